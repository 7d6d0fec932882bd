"""The pages of docs/ say what the files say: diffs, flags, metrics, links, counted bytes.

`python tests/test_docs.py` writes the generated parts anew: what stands between `<!-- NAME -->` and
`<!-- /NAME -->`.
"""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from statistics import stdev

import pytest
from conftest import ROOT, SCRIPTS, read_jsonl, run
from tools import count_memory, result_tables

import analysis  # after conftest, which makes the root importable

DOCS = ROOT / "docs"
PAGES = ["algorithms.md", "metrics.md", "performance.md", "results.md"]
FOREIGN = set(  # flags of torchrun, of analysis.py and of make_tiny.py
    "nproc-per-node nnodes node-rank rdzv-backend rdzv-endpoint out runs"
    " rounds only exact guess_up_to skilled rambling".split())


def code(path):
    """A script without its docstring."""
    return path.read_text(encoding="utf-8").split('"""\n', 1)[1]


def changes(name):
    """What `diff` finds between grpo.py and a script, without their docstrings."""
    with tempfile.TemporaryDirectory() as folder:
        for script in ("grpo", name):
            Path(folder, script).write_text(code(ROOT / f"{script}.py"), encoding="utf-8")
        command = ["diff", "-U0", "grpo", name]
        lines = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    hunks = [hunk.splitlines()[1:] for hunk in re.split("^@@", lines, flags=re.M)[1:]]
    return "```diff\n" + "\n...\n".join("\n".join(hunk) for hunk in hunks) + "\n```"


def generated(page):
    """{name: text} of the parts of a page that are made from the files."""
    if page == "algorithms.md":
        return {f"{name} diff": changes(name) for name in SCRIPTS if name != "grpo"}
    if page == "performance.md":
        return count_memory.tables()
    if page == "results.md":
        return result_tables.results()
    return {}


def part(name):
    return re.compile(f"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.S)


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_current(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, expected in generated(page).items():
        shown = part(name).search(text)
        assert shown, f"docs/{page} has no part named {name}"
        assert shown[2] == expected + "\n", f"{name} is stale: run python tests/test_docs.py"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for path in set(re.findall(r"\]\((?!http|#)([^)#]+)", text)):
        assert (DOCS / path).exists(), path
    headings = {anchor(line) for line in re.findall("^#+ (.*)", text, re.M)}
    for name in re.findall(r"\]\(#([^)]+)\)", text):
        assert name in headings, name


def anchor(heading):
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page):
    known = set(FOREIGN)
    for script in SCRIPTS.values():
        for field in dataclasses.fields(script.Args):
            known |= {field.name, f"no_{field.name}"}
    text = (DOCS / page).read_text(encoding="utf-8")
    unknown = set(re.findall(r"--(\w[\w-]*)", text)) - known
    assert not unknown


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_commands_of_analysis_exist(page):
    known = set(re.findall(r"python analysis\.py (\w+)", analysis.__doc__))
    text = (DOCS / page).read_text(encoding="utf-8")
    for command, rest in re.findall(r"python analysis\.py (\w+)([^`\n]*)", text):
        assert command in known
        for path in re.findall(r"docs/runs/\S+", rest):
            assert (ROOT / path).exists(), path


def test_every_metric_is_explained(data, tmp_path):
    folder = tmp_path / "run"
    run(data, folder, "--steps", 1)
    keys = {key for line in read_jsonl(folder / "metrics.jsonl") for key in line}
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `([^`]+)` \|", text, re.M))
    assert {re.sub(r"@\d+", "@k", key) for key in keys} - explained == set()


def test_the_error_over_problems_counts_pairs_of_numbers(monkeypatch):
    """With one problem for each pair it is the usual one; copies of them add no knowledge."""
    rewards = [0, 0.25, 1, 0.5, 1]
    rows = [("question", "answer", pair) for pair in range(5)]
    monkeypatch.setattr(result_tables, "make_problems", lambda: {"test": rows})
    expected = stdev(rewards) / len(rewards) ** 0.5
    assert result_tables.error_over_pairs(rewards) == pytest.approx(expected)
    monkeypatch.setattr(result_tables, "make_problems", lambda: {"test": rows * 3})
    assert result_tables.error_over_pairs(rewards * 3) == pytest.approx(expected)


def test_no_training_problem_has_a_pair_of_the_test_problems():
    splits = result_tables.make_problems()
    pairs = {split: {pair for _, _, pair in rows} for split, rows in splits.items()}
    assert len(pairs["test"]) == 15 and not pairs["test"] & pairs["train"]


def write():
    """Put the generated parts into the pages."""
    for page in PAGES:
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        for name, new in generated(page).items():
            text = part(name).sub(lambda found: found[1] + new + "\n" + found[3], text)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
