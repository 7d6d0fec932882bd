"""The tables of README.md and docs/results.md, from the logs in docs/runs.

    python tests/tools/result_tables.py

It prints them; test_readme.py and test_docs.py write and check them. The numbers are those that
`python analysis.py curves`, `map` and `lengths` print.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import analysis
import matplotlib.pyplot as plt

TINY = {  # label of `analysis.py curves`: command and G
    "grpo G=8": ("grpo.py", 8),
    "dr_grpo G=8": ("dr_grpo.py", 8),
    "sign_grpo G=8": ("sign_grpo.py", 8),
    "length_alpha G=8": ("length_alpha.py (α = ½)", 8),
    "ep_grpo G=8 λ=0.1": ("ep_grpo.py", 8),
    "ep_grpo no entropy_gate G=8 λ=0.1": ("ep_grpo.py --no_entropy_gate", 8),
    "ep_grpo G=8 λ=0.0": ("ep_grpo.py --progress_weight 0", 8),
    "ep_grpo G=8 λ=0.1 no zero_variance_anchor": ("ep_grpo.py --no_zero_variance_anchor", 8),
    "grpo G=4": ("grpo.py", 4),
    "dr_grpo G=4": ("dr_grpo.py", 4),
    "sign_grpo G=4": ("sign_grpo.py", 4),
    "length_alpha G=4": ("length_alpha.py (α = ½)", 4),
    "ep_grpo G=4 λ=0.1": ("ep_grpo.py", 4),
}
LENGTHS = {  # label of `analysis.py lengths`: command, weight, whether it divides by the std
    "grpo": ("grpo.py", "1 / L", "yes"),
    "ep_grpo": ("ep_grpo.py", "1 / L", "yes"),
    "length_alpha α=0.0 no scale_rewards": ("length_alpha.py --alpha 0", "1 / L", "no"),
    "length_alpha α=0.25 no scale_rewards": ("length_alpha.py --alpha 0.25", "between", "no"),
    "length_alpha α=0.5 no scale_rewards": ("length_alpha.py", "between", "no"),
    "length_alpha α=0.75 no scale_rewards": ("length_alpha.py --alpha 0.75", "between", "no"),
    "dr_grpo": ("dr_grpo.py", "1 / C", "no"),
    "sign_grpo": ("sign_grpo.py", "1 / C", "no"),
    "length_alpha α=1.0": ("length_alpha.py --alpha 1 --scale_rewards", "1 / C", "yes"),
}


def rows_of(command, name):
    """The rows of the first table that a command of analysis.py prints for docs/runs/name.jsonl."""
    options = analysis.parse_options([command, str(ROOT / "docs/runs" / f"{name}.jsonl")])
    tables, figure = options.function(options)
    plt.close(figure)
    return tables[0][2]


def markdown(header, rows):
    lines = [f"| {' | '.join(map(str, row))} |" for row in [header, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def tiny_tables():
    """(the table of README.md, that of docs/results.md) for the tiny model."""
    found = {row[0]: row for row in rows_of("curves", "tiny")}
    short = []
    long = []
    for label, (command, G) in TINY.items():
        _, seeds, _, before, _, after, sd, _, share, iid = found[label]
        long.append([command, G, seeds, f"{after:.3f}", f"{sd:.3f}", f"{share:.2f}", f"{iid:.2f}"])
        other = found.get(label.replace("G=8", "G=4"))
        if G == 8 and other:
            short.append([command, f"{before:.3f}", f"{after:.3f}", f"{other[5]:.3f}"])
    columns = ["accuracy before", "accuracy after, G = 8", "accuracy after, G = 4"]
    names = ["G", "seeds", "accuracy", "sd", "zero-variance share", "i.i.d. prediction"]
    return markdown(["script", *columns], short), markdown(["script", *names], long)


def map_table():
    """Final accuracy by base and G, a column per script."""
    cells = {}
    for row, script, _, accuracy, *_ in rows_of("map", "map"):
        cells.setdefault(row, {})[script] = f"{accuracy:.3f}"
    scripts = ["grpo", "dr_grpo", "sign_grpo"]
    rows = [[*row.split(", G = "), *(found[s] for s in scripts)] for row, found in cells.items()]
    return markdown(["base (accuracy before)", "G", *(f"{script}.py" for script in scripts)], rows)


def lengths_table():
    """Tokens of right and of wrong responses after training, by what the weight is."""
    lengths = {(label, step): numbers for label, _, step, *numbers in rows_of("lengths", "lengths")}
    curves = {row[0]: row for row in rows_of("curves", "lengths")}

    def cells(label, step, accuracy):
        right, _, wrong, long = lengths[label, step]
        return [f"{accuracy:.3f}", f"{right:.1f}", f"{wrong:.1f}", f"{long:.2f}"]

    rows = [["all, before training", "", "", *cells("grpo", 0, curves["grpo"][3])]]
    for label, setting in LENGTHS.items():
        rows.append([*setting, *cells(label, 60, curves[label][5])])
    names = ["accuracy", "right responses, tokens", "wrong responses, tokens", "long wrong ones"]
    return markdown(["script", "weight", "std", *names], rows)


def results():
    """{name of a part of docs/results.md: its table}."""
    return {"tiny": tiny_tables()[1], "map": map_table(), "lengths": lengths_table()}


if __name__ == "__main__":
    print("\n\n".join([tiny_tables()[0], *results().values()]))
