"""Two scripts side by side: `python analysis.py diff` makes one HTML page with this module.

The page needs nothing but a browser: its style stands inside it, and it has no scripts. The same
files always give the same page.
"""

import ast
import difflib
import re
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path

from common import BadInput

ROOT = Path(__file__).resolve().parent
SCRIPTS = ["grpo.py", "dr_grpo.py", "sign_grpo.py", "length_alpha.py", "ep_grpo.py"]
BLOCK = "# --- algorithm ---"  # the comment, at the margin, over what the scripts differ in
CONTEXT = 2  # equal lines shown around a change

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2328; --dim: #59636e; --rule: #d1d9e0;
  --panel: #f6f8fa; --old: #ffebe9; --old-word: #ffc0bb; --new: #e2f7e6; --new-word: #9fe3ad;
  --accent: #0969da; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1;
  --rule: #3d444d; --panel: #151b23; --old: #3a1a1d; --old-word: #7d2b30; --new: #14301f;
  --new-word: #1f6b37; --accent: #4493f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 1rem; max-width: 70ch; }
fieldset { display: flex; flex-wrap: wrap; gap: .5rem; border: 0; margin: 0; padding: 0; }
legend { padding: 0; margin-bottom: .25rem; color: var(--dim); }
fieldset label { border: 1px solid var(--rule); border-radius: 6px; padding: .3rem .7rem;
  cursor: pointer; }
fieldset small { color: var(--dim); }
fieldset label:has(:checked) { border-color: var(--accent); box-shadow: 0 0 0 1px var(--accent); }
@supports selector(:has(a)) { .pair { display: none; } }
.two { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); column-gap: 8px; }
.side { display: grid; grid-row: span var(--rows); grid-template-rows: subgrid; }
.about { padding: .5rem .75rem; background: var(--panel); border: 1px solid var(--rule);
  border-radius: 6px; margin-bottom: 8px; min-width: 0; }
.about h3 { font: 600 1rem/1.5 ui-monospace, monospace; margin: 0; }
.about p { margin: 0 0 .5rem; }
.about code { display: block; font: 12px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; padding-left: 4ch; text-indent: -4ch; }
.line { display: grid; grid-template-columns: 3.4em minmax(0, 1fr);
  font: 12px/1.5 ui-monospace, monospace; }
.line code { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere;
  padding-left: 2ch; text-indent: -2ch; }
.line i { font-style: normal; color: var(--dim); text-align: right; padding-right: 1ch;
  user-select: none; }
.both { grid-template-columns: 3.4em 3.4em minmax(0, 1fr); }
.old { background: var(--old); } .old mark { background: var(--old-word); }
.new { background: var(--new); } .new mark { background: var(--new-word); }
.old i::after { content: "-"; } .new i::after { content: "+"; }
.none { background: var(--panel); }
mark { color: inherit; border-radius: 3px; }
details { border: 1px solid var(--rule); border-radius: 6px; margin: 6px 0; }
summary { cursor: pointer; padding: .2rem .75rem; color: var(--dim); font-size: .875rem;
  background: var(--panel); border-radius: 6px; }
@media (max-width: 900px) { .two, .side { display: block; } .none { display: none; }
  .side + .side .about { margin-top: 1rem; } .same .side + .side { display: none; } }
"""


def write_page(scripts, output=None):
    """Write the page for the first script beside each of the others; returns its path."""
    if len(scripts) == 1:
        raise BadInput("diff compares two scripts or more, the first with each of the others")
    default = ROOT / "docs" / "side_by_side.html" if not scripts else Path("runs/side_by_side.html")
    path = Path(output or default)
    page = make_page(scripts or [ROOT / name for name in SCRIPTS])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the page --output {path}: {error}") from error
    return path


def make_page(paths):
    """The page as text: a pair for each script after the first, chosen by a menu."""
    first, *others = [read_script(path) for path in paths]
    title = f"{first.name} and {others[0].name if len(others) == 1 else 'its variants'}"
    rules = [
        f"body:has(#choose-{i}:checked) #pair-{i} {{ display: block; }}"
        for i in range(len(others))
    ]
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}, side by side</title>",
        f"<style>{STYLE}" + "\n".join(rules) + "\n</style>\n</head>\n<body>",
        f"<h1>{escape(title)}, side by side</h1>",
        "<p>Red lines stand only on the left, green ones only on the right. The words that differ "
        "are marked. Equal parts are folded: click to open them.</p>",
        make_menu(first, others),
        *(make_pair(first, other, i) for i, other in enumerate(others)),
        "</body>\n</html>\n",
    ])  # fmt: skip


def make_menu(first, others):
    """Radio buttons, one per pair; the page's style shows the pair that is chosen."""
    lines = [f"<fieldset>\n<legend>Compare {escape(first.name)} with</legend>"]
    for i, other in enumerate(others):
        checked = " checked" if i == 0 else ""
        button = f'<input type="radio" name="pair" id="choose-{i}"{checked}>'
        number = f"<small>{count_changes(first, other)} lines differ</small>"
        lines.append(f"<label>{button} {escape(other.name)} {number}</label>")
    return "\n".join([*lines, "</fieldset>"])


# --- a script and its parts ---
class Script:
    """A script cut into its docstring, its algorithm block and the rest: (number, text) lines."""

    def __init__(self, name, text):
        tree = ast.parse(text)
        self.name = name
        self.names = {node.lineno: node.name for node in tree.body if hasattr(node, "name")}
        self.about = ast.get_docstring(tree, clean=False) or ""
        lines = list(enumerate(text.splitlines(), 1))
        end = tree.body[0].end_lineno if self.about else 0
        start = next((i for i, line in lines if line == BLOCK and i > end), len(lines) + 1)
        after = [i for i, line in lines if line.startswith("# --- ") and i > start]
        stop = after[0] if after else len(lines) + 1
        self.docstring = lines[:end]
        self.algorithm = trim(lines[start - 1 : stop - 1])
        self.rest = lines[end : start - 1] + lines[stop - 1 :]

    def formula(self):
        """The docstring's first indented paragraph: a list of lines."""
        found = re.search(r"(?:^    .+\n?)+", self.about, re.MULTILINE)
        return [line[4:] for line in found.group().splitlines()] if found else []


def read_script(path):
    path = Path(path)
    name = path.name if path.parent == ROOT else str(path)
    try:
        return Script(name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the script {path}: {error}") from error
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"{path} is not a Python script: {error}") from error


def trim(lines):
    """The lines without blank ones at the end."""
    while lines and not lines[-1][1].strip():
        lines = lines[:-1]
    return lines


# --- what is equal and what is not ---
def align(left, right):
    """Pairs of lines, None where a side has no line: equal ones, similar ones, lone ones."""
    texts = [[text for _, text in side] for side in (left, right)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    pairs = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            pairs += zip(left[a:b], right[c:d])
        else:
            pairs += align_changed(left[a:b], right[c:d])
    return pairs


def align_changed(left, right):
    """Pair the most similar lines first, then what stands above and below them."""
    alike = [
        (similarity(a, b) + 0.2 * (a.split()[:1] == b.split()[:1]), -abs(i - j), -i, -j)
        for i, (_, a) in enumerate(left)
        for j, (_, b) in enumerate(right)
    ]
    best = max(alike, default=(0, 0, 0, 0))
    if best[0] < 0.6:
        return list(zip_longest(left, right))
    i = -best[2]
    j = -best[3]
    above = align_changed(left[:i], right[:j])
    below = align_changed(left[i + 1 :], right[j + 1 :])
    return [*above, (left[i], right[j]), *below]


def words(text):
    return re.findall(r"\w+|\s+|.", text)


def similarity(a, b):
    return difflib.SequenceMatcher(None, words(a.strip()), words(b.strip()), False).ratio()


def is_equal(pair):
    return all(pair) and pair[0][1] == pair[1][1]


def count_changes(first, other):
    """How many lines stand on one side only, docstrings aside: as `diff` counts them."""
    left = first.rest + first.algorithm
    right = other.rest + other.algorithm
    changed = [pair for pair in align(left, right) if not is_equal(pair)]
    return sum(line is not None for pair in changed for line in pair)


# --- HTML ---
def make_pair(first, other, number):
    """The comparison of two scripts: algorithm block, the rest, docstrings."""
    headings = [make_heading(first), make_heading(other)]
    block = two_sides(align(first.algorithm, other.algorithm), headings)
    return "\n".join([
        f'<section class="pair" id="pair-{number}">',
        "<h2>The algorithm</h2>",
        block,
        "<h2>The rest of the code</h2>",
        *fold(align(first.rest, other.rest), first.names),
        "<h2>The docstrings</h2>",
        *fold(align(first.docstring, other.docstring), {}),
        "</section>",
    ])  # fmt: skip


def make_heading(script):
    """A script's name, and its title and formulas from the docstring."""
    title = escape(script.about.split("\n")[0])
    formula = "\n".join(f"<code>{escape(line)}</code>" for line in script.formula())
    return f'<div class="about"><h3>{escape(script.name)}</h3>\n<p>{title}</p>\n{formula}</div>'


def fold(pairs, names):
    """Changes with a little context, and between them equal parts, folded."""
    shown = set()
    for i, pair in enumerate(pairs):
        if not is_equal(pair):
            shown |= set(range(i - CONTEXT, i + CONTEXT + 1))
    parts = []
    for (equal, near), run in groupby(enumerate(pairs), lambda x: (is_equal(x[1]), x[0] in shown)):
        part = [pair for _, pair in run]
        if not equal:
            parts.append(two_sides(part))
        elif near or len(part) <= CONTEXT:
            parts.append(f'<div class="same">{two_sides(part)}</div>')
        else:
            parts.append(fold_equal(part, names))
    return parts


def fold_equal(pairs, names):
    """Equal lines, once, with both line numbers, behind a summary that says what they hold."""
    lines = [
        f'<div class="line both"><i>{a}</i><i>{b}</i><code>{escape(text)}</code></div>'
        for (a, text), (b, _) in pairs
    ]
    held = [names[a] for (a, _), _ in pairs if a in names]
    title = f"{len(pairs)} equal lines" + (f": {', '.join(held)}" if held else "")
    return f"<details><summary>{title}</summary>\n" + "\n".join(lines) + "\n</details>"


def two_sides(pairs, above=("", "")):
    """Pairs of lines as two columns, each under its heading."""
    cells = [list(cell) for cell in zip(*(make_cells(*pair) for pair in pairs))] or [[], []]
    parts = ['<div class="two">']
    for heading, side in zip(above, cells):
        rows = len(side) + bool(heading)
        parts.append(f'<div class="side" style="--rows: {rows}">{heading}')
        parts += [*side, "</div>"]
    return "\n".join([*parts, "</div>"])


def make_cells(left, right):
    """The HTML of a line on the left and of its partner on the right."""
    if left and right and left[1] == right[1]:
        return make_line("equal", left), make_line("equal", right)
    if not (left and right) or similarity(left[1], right[1]) < 0.5:
        return make_line("old", left), make_line("new", right)
    marked = ["", ""]
    parts = words(left[1]), words(right[1])
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *parts, autojunk=False).get_opcodes():
        for side, part in enumerate([parts[0][a:b], parts[1][c:d]]):
            text = escape("".join(part))
            core = text.strip()
            if kind != "equal" and core:
                text = text.replace(core, f"<mark>{core}</mark>")
            marked[side] += text
    return make_line("old", left, marked[0]), make_line("new", right, marked[1])


def make_line(kind, line, code=None):
    if line is None:
        return '<div class="line none"></div>'
    number, text = line
    return f'<div class="line {kind}"><i>{number}</i><code>{code or escape(text)}</code></div>'
