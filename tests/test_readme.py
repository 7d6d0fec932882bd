"""README.md shows what the files say: its diffs are made from them, and its commands are the ones that CI runs.

`python tests/test_readme.py` writes the generated parts anew, between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
VARIANTS = ("dr_grpo", "sign_grpo", "length_alpha", "ep_grpo")


def changes(name):
    """What `diff` finds between grpo.py and a script, module docstrings aside: hunks of lines, each with its - or +."""
    with tempfile.TemporaryDirectory() as folder:
        for script in ("grpo", name):
            Path(folder, script).write_text((ROOT / f"{script}.py").read_text().split('"""\n', 1)[1])
        lines = subprocess.run(["diff", "-U0", "grpo", name], cwd=folder, capture_output=True, text=True).stdout
    return [hunk.splitlines()[1:] for hunk in re.split("^@@", lines, flags=re.M)[1:]]


def generated():
    table = ["| script | lines that differ from grpo.py | places |", "|---|---|---|"]
    parts = {}
    for name in VARIANTS:
        hunks = changes(name)
        table.append(f"| {name}.py | {sum(map(len, hunks))} | {len(hunks)} |")
        parts[f"{name} diff"] = "```diff\n" + "\n...\n".join("\n".join(hunk) for hunk in hunks) + "\n```"
    return {"diff table": "\n".join(table), **parts}


def test_the_diffs_in_readme_are_those_of_the_files():
    readme = (ROOT / "README.md").read_text()
    for name, text in generated().items():
        shown = re.search(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", readme, re.S)
        assert shown, f"README.md has no part named {name}"
        assert shown[1] == text, f"README.md is stale in {name}: run python tests/test_readme.py"


def test_ci_runs_the_test_command_of_the_readme():
    assert "python -m pytest" in (ROOT / "README.md").read_text()
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_path_that_readme_names_exists():
    for path in set(re.findall(r"\]\((?!http|#)([^)#]+)\)", (ROOT / "README.md").read_text())):
        assert (ROOT / path).exists(), path


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text()
    for name, text in generated().items():
        before, rest = readme.split(f"<!-- {name} -->\n")
        readme = f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{rest.split(f'<!-- /{name} -->')[1]}"
    (ROOT / "README.md").write_text(readme)
