"""The page of `analysis.py diff`: current, complete, self-contained, good for any two scripts."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest

import analysis
from common import BadInput
from conftest import ROOT

SCRIPTS = [ROOT / name for name in analysis.SCRIPTS]
MINE = '''"""My own: <b>GRPO</b> with a longer memory.

    advantage   A_i = r_i & nothing else
"""

import torch
from dataclasses import dataclass


# --- algorithm ---
def compute_advantages(batch, args):
    return batch.rewards  # (P, G)


# --- the rest ---
def main(args):
    print("</code><script>alert(1)</script>")
'''


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def columns(page, number):
    """{"left": [(line number, text), ...], "right": ...} as the page's pair shows them."""
    pair = re.search(rf'<section class="pair" id="pair-{number}">(.*?)</section>', page, re.DOTALL)
    sides = {"left": [], "right": []}
    side = ""
    pattern = r'(<div class="two">)|(<div class="side")|<div class="line (\w+)">(.*?)</div>'
    for match in re.finditer(pattern, pair.group(1), re.DOTALL):
        two, new_side, kind, cell = match.groups()
        if two:
            side = ""
        elif new_side:
            side = "right" if side == "left" else "left"
        elif kind != "none":
            *numbers, code = re.findall(r"<(?:i|code)>(.*?)</(?:i|code)>", cell, re.DOTALL)
            text = unescape(re.sub("</?mark>", "", code))
            for i, number in enumerate(numbers):
                name = ["left", "right"][i] if kind == "both" else side
                sides[name].append((int(number), text))
    return sides


class Balance(HTMLParser):
    """Fails at a tag that closes another than the last one opened."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_in_docs_is_current():
    """If this fails: python analysis.py diff."""
    page = (ROOT / "docs/side_by_side.html").read_text(encoding="utf-8")
    assert page == analysis.make_page(SCRIPTS)


def test_the_page_needs_nothing_from_elsewhere():
    page = analysis.make_page(SCRIPTS)
    balance = Balance()
    balance.feed(page)
    assert balance.open == [] and balance.addresses == []
    style = page.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert "<script" not in page
    assert "color-scheme: light dark" in style and "max-width: 900px" in style


def test_every_line_of_both_scripts_is_shown_once_with_its_number():
    page = analysis.make_page(SCRIPTS)
    for number, other in enumerate(SCRIPTS[1:]):
        shown = columns(page, number)
        for side, path in ("left", SCRIPTS[0]), ("right", other):
            lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
            blank = {line for line in shown[side] if not line[1].strip()}
            assert sorted(set(shown[side]) | {x for x in lines if not x[1].strip()}) == lines
            assert len(shown[side]) == len(set(shown[side])) and blank <= set(lines)


def test_the_algorithm_comes_first_and_the_formulas_above_it():
    page = analysis.make_page(SCRIPTS)
    for number, other in enumerate(SCRIPTS[1:]):
        shown = columns(page, number)
        for side in "left", "right":
            assert shown[side][0][1] == "# --- algorithm ---"
            block = [text for _, text in shown[side][:80]]
            assert block[1:].index("def compute_weights(batch, args):") > 3
        pair = page.split(f'id="pair-{number}"')[1]
        heads = unescape(pair).split('<div class="about">')[1:3]
        for path, head in zip((SCRIPTS[0], other), heads):
            formula = analysis.Script(path).formula()
            assert len(formula) >= 2 and all(f"<code>{line}</code>" in head for line in formula)
            assert head.startswith(f"<h3>{path.name}</h3>")
            assert head.index(formula[-1]) < head.index("# --- algorithm ---")


def test_the_menu_chooses_among_all_others():
    page = analysis.make_page(SCRIPTS)
    menu = page.split("<fieldset>")[1].split("</fieldset>")[0]
    counts = re.findall(r'id="choose-(\d)".*?> (\w+\.py) <small>(\d+) lines differ', menu)
    assert [(i, name) for i, name, _ in counts] == [
        ("0", "dr_grpo.py"), ("1", "sign_grpo.py"), ("2", "length_alpha.py"), ("3", "ep_grpo.py"),
    ]  # fmt: skip
    assert menu.count(" checked") == 1
    for i in range(4):
        assert f"body:has(#choose-{i}:checked) #pair-{i} {{ display: block; }}" in page
    assert all(1 <= int(number) <= 60 for _, _, number in counts)


def test_what_is_equal_is_folded_and_what_differs_is_not():
    page = analysis.make_page(SCRIPTS)
    pair = page.split('id="pair-0"')[1].split("</section>")[0]
    folded = re.findall(r"<details>(.*?)</details>", pair, re.DOTALL)
    assert folded and all('"line both"' in part and "<mark>" not in part for part in folded)
    names = [name for part in folded for name in re.search(": (.*)</summ", part)[1].split(", ")]
    assert {"policy_loss", "main", "rollout"} <= set(names)
    # Around a change two equal lines are shown, above and below it, on the left and on the right.
    pair = page.split('id="pair-3"')[1].split("</section>")[0]
    pair = re.sub(r"<details>.*?</details>", "", pair, flags=re.DOTALL)
    rest = pair.split("The rest of the code")[1].split("The docstrings")[0]
    hunks = rest.count('<div class="two">') - rest.count('<div class="same">')
    assert hunks >= 1 and 0 < rest.count('"line equal"') <= 8 * hunks


def test_the_words_that_differ_are_marked(tmp_path):
    a = write(tmp_path / "a.py", "# --- algorithm ---\nx = centred / (std + 1e-4)  # (P, G)\n")
    b = write(tmp_path / "b.py", "# --- algorithm ---\nx = centred  # (P, G)\nnew = 1 < 2\n")
    page = analysis.make_page([a, b])
    marked = "<i>2</i><code>x = centred <mark>/ (std + 1e-4)</mark>  # (P, G)</code>"
    assert f'<div class="line old">{marked}</div>' in page
    assert '<div class="line new"><i>2</i><code>x = centred  # (P, G)</code></div>' in page
    assert '<div class="line new"><i>3</i><code>new = 1 &lt; 2</code></div>' in page
    assert "3 lines differ" in page


def test_a_copied_script_is_compared_and_its_text_is_escaped(tmp_path, monkeypatch, capsys):
    mine = write(tmp_path / "mine.py", MINE)
    monkeypatch.chdir(tmp_path)
    analysis.main(["diff", str(ROOT / "grpo.py"), "mine.py"])
    assert capsys.readouterr().out == "Page: runs/side_by_side.html\n"
    page = (tmp_path / "runs/side_by_side.html").read_text(encoding="utf-8")
    assert "<title>grpo.py and mine.py, side by side</title>" in page
    assert "<code>advantage   A_i = r_i &amp; nothing else</code>" in page
    assert "<p>My own: &lt;b&gt;GRPO&lt;/b&gt; with a longer memory.</p>" in page
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    numbers = [number for number, _ in columns(page, 0)["right"]]
    assert set(numbers) >= {i for i, x in enumerate(MINE.splitlines(), 1) if x.strip()}
    analysis.main(["diff", str(ROOT / "grpo.py"), str(mine), "--output", "again.html"])
    assert (tmp_path / "again.html").exists()


def test_equal_scripts_and_scripts_without_marks_give_a_page_too(tmp_path):
    a = write(tmp_path / "a.py", "x = 1\n")
    b = write(tmp_path / "b.py", "")
    copy = write(tmp_path / "copy.py", SCRIPTS[0].read_text(encoding="utf-8"))
    for paths, lines in ([a, b], 1), ([b, a], 1), ([SCRIPTS[0], copy], 0), ([a, a], 0):
        page = analysis.make_page(paths)
        Balance().feed(page)
        assert f"{lines} lines differ" in page
    assert columns(page, 0) == {"left": [(1, "x = 1")], "right": [(1, "x = 1")]}


@pytest.mark.parametrize(
    "names, message",
    [
        (["{root}/grpo.py"], "two scripts or more"),
        (["{root}/grpo.py", "nowhere.py"], "cannot read the script nowhere.py"),
        (["{root}/grpo.py", "{tmp}/broken.py"], "cannot read the script .*broken.py"),
        (["{root}/grpo.py", "{tmp}/binary.py"], "cannot read the script .*binary.py"),
    ],
)
def test_bad_scripts_are_named(names, message, tmp_path):
    write(tmp_path / "broken.py", "def f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    names = [name.format(root=ROOT, tmp=tmp_path) for name in names]
    with pytest.raises(BadInput, match=message):
        analysis.main(["diff", *names, "--output", str(tmp_path / "page.html")])


def test_a_page_that_cannot_be_written_is_named():
    with pytest.raises(BadInput, match="cannot write --output /proc/nowhere/page.html"):
        analysis.main(["diff", "--output", "/proc/nowhere/page.html"])
