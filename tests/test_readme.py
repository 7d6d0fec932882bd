"""README.md shows what the files say: its diff, tables and commands are checked against them.

`python tests/test_readme.py` writes the parts between `<!-- NAME -->` and `<!-- /NAME -->` again.
"""

import ast
import dataclasses
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from tools import result_tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/exercises/README.md"]  # test_docs.py has the others
SUMMARY = {  # advantage per response or token, weight per token, in a few words
    "grpo": ("r − mean, divided by the group's std", "1 / L / B", "the standard baseline"),
    "dr_grpo": ("r − mean", "1 / C / B", "GRPO without its two biases"),
    "sign_grpo": ("2r − 1", "1 / C / B", "learns from groups that are all wrong"),
    "length_alpha": ("r − mean", "L^(α−1) / C^α / B", "from GRPO (α = 0) to Dr. GRPO (α = 1)"),
    "ep_grpo": ("entropy gate · GRPO's + λ · progress", "1 / L / B", "one advantage per token"),
}


def changes(name):
    """Hunks of lines, each with its - or +, in which a script differs below its docstring."""
    with tempfile.TemporaryDirectory() as folder:
        for script in ("grpo", name):
            code = (ROOT / f"{script}.py").read_text().split('"""\n', 1)[1]
            Path(folder, script).write_text(code)
        command = ["diff", "-U0", "grpo", name]
        lines = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return [hunk.splitlines()[1:] for hunk in re.split("^@@", lines, flags=re.M)[1:]]


def lines_of(name):
    """Where in grpo.py a class, function or assignment stands: "12" or "12-34"."""
    for node in ast.parse((ROOT / "grpo.py").read_text()).body:
        targets = [target.id for target in getattr(node, "targets", []) if hasattr(target, "id")]
        if name == getattr(node, "name", None) or name in targets:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return f"{first}–{node.end_lineno}"
    raise AssertionError(name)


def generated():
    hunks = changes("dr_grpo")
    body = "\n".join("\n".join(hunk) for hunk in hunks)
    table = ["| script | advantage | weight | what for | lines changed |", "|---|---|---|---|---|"]
    for name, cells in SUMMARY.items():
        count = sum(map(len, changes(name))) if name != "grpo" else "–"
        table.append(f"| [{name}.py]({name}.py) | {' | '.join(cells)} | {count} |")
    reading = ["| grpo.py, lines | |", "|---|---|"]
    for what, text in {
        "Args": "every flag, with its help",
        "Batch": "the data of one step, with shapes",
        "compute_advantages": "**the algorithm**: how good each token was",
        "compute_weights": "**the algorithm**: how much each token counts",
        "compute_reward": "where a reward comes from",
        "policy_loss": "clipped surrogate and KL penalty",
        "main": "the loop: sample and reward, advantages and weights, update, log",
    }.items():
        reading.append(f"| {lines_of(what)} | `{what}`: {text} |")
    return {
        "dr_grpo diff": f"```diff\n{body}\n```",
        "table": "\n".join(table),
        "reading": "\n".join(reading),
        "results": result_tables.tiny_tables()[0],
    }


def test_the_generated_parts_are_current():
    readme = (ROOT / "README.md").read_text()
    for name, text in generated().items():
        shown = re.search(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", readme, re.S)
        assert shown, f"README.md has no part named {name}"
        assert shown[1] == text, f"README.md is stale in {name}: run python tests/test_readme.py"


def test_it_is_a_front_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 180
    assert lines.index("```diff") < 25


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall("python -m pytest.*", (ROOT / "README.md").read_text())
    assert commands == ["python -m pytest -q tests"]
    assert "README.md" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=["README", "exercises"])
def test_every_path_that_a_page_names_exists(page):
    for path in set(re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())):
        assert (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=["README", "exercises"])
def test_every_flag_in_a_command_exists(page):
    import conftest

    for line in re.findall(r"^.*\bpython (?:\w+\.py) .*$|^torchrun .*$", page.read_text(), re.M):
        words = shlex.split(line.partition("  #")[0].strip("`$ "), comments=True)
        script = next((word[:-3] for word in words if word.endswith(".py")), None)
        if script not in conftest.SCRIPTS:
            continue
        known = {f"--{field.name}" for field in dataclasses.fields(conftest.SCRIPTS[script].Args)}
        known |= {flag.replace("--", "--no_", 1) for flag in known}
        rest = words[words.index(f"{script}.py") :]
        assert {word for word in rest if word.startswith("--")} <= known, line


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text()
    for name, text in generated().items():
        before, rest = readme.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- /{name} -->")[1]
        readme = f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{after}"
    (ROOT / "README.md").write_text(readme)
