"""The tables of README.md and docs/results.md, from the logs in docs/runs.

    python tests/tools/result_tables.py

It prints them; test_readme.py and test_docs.py write and check them. `python analysis.py curves`,
`map` and `lengths` and count_additions.py print the same numbers, or those of the single runs.
"""

import math
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import analysis
import matplotlib.pyplot as plt
from make_words import make_problems

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


SCRIPTS = ["grpo", "dr_grpo", "sign_grpo", "length_alpha", "ep_grpo"]
STALL = {  # run of docs/runs/stall.jsonl: what was changed
    "grpo_none_s0": "none (120 steps, learning rate 3e-4, G = 8, T = 1)",
    "grpo_lr1e-4_s0": "`--learning_rate 1e-4`",
    "grpo_lr1e-3_s0": "`--learning_rate 1e-3`",
    "grpo_G16_s0": "`--group_size 16`",
    "grpo_T0.7_s0": "`--temperature 0.7 --eval_temperature 1`",
    "grpo_T1.3_s0": "`--temperature 1.3 --eval_temperature 1`",
    "grpo_steps480_s0": "`--steps 480`",
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


def read_runs(name):
    return analysis.read_packed(ROOT / "docs/runs" / f"{name}.jsonl")


def skill_table():
    """Accuracy of the map's bases before training, and how many of their additions are right."""
    found = {}
    for log in read_runs("map"):
        base = Path(log.config["model"]).name
        found.setdefault(base, []).append(log.evals[0]["additions"])
    rows = []
    for base, shares in sorted(found.items(), key=lambda item: fmean(x[2] for x in item[1])):
        accuracy, _, right = map(analysis.mean, zip(*shares))
        rows.append([base, f"{100 * accuracy:.1f} %", f"{right:.2f}"])
    return markdown(["base", "accuracy", "additions right"], rows)


def stall_table():
    """What one change does to a run that stalls, at its last evaluation."""
    last = {log.name: log.evals[-1] for log in read_runs("stall")}
    rows = []
    for name, change in STALL.items():
        accuracy = last[name]["eval_accuracy"]
        _, stepwise, right = last[name]["additions"]
        rows.append([change, f"{accuracy:.3f}", f"{stepwise:.2f}", f"{right:.2f}"])
    return markdown(["change", "accuracy after", "step by step", "additions right"], rows)


def weak_table():
    """Accuracy of all five after training from a weak base: mean and deviation over seeds."""
    found = {}
    for log in read_runs("map") + read_runs("weak"):
        if log.config["model"].endswith("tiny-0.11"):
            cell = found.setdefault((log.script, log.config["group_size"]), [])
            cell.append(log.evals[-1]["eval_accuracy"])
    rows = []
    for script in SCRIPTS:
        row = [f"{script}.py"]
        for G in (2, 4, 8):
            row += [f"{fmean(found[script, G]):.3f}", f"{stdev(found[script, G]):.3f}"]
        rows.append(row)
    names = [name for G in (2, 4, 8) for name in (f"G = {G}", "sd")]
    return markdown(["script", *names], rows)


def error_over_pairs(rewards):
    """Standard error of the mean of the test problems' rewards.

    Problems with the same pair of numbers are not independent: what counts are the pairs' sums.
    """
    mean = fmean(rewards)
    sums = Counter()
    for (_, _, pair), reward in zip(make_problems()["test"], rewards, strict=True):
        sums[pair] += reward - mean
    variance = sum(x**2 for x in sums.values()) * len(sums) / (len(sums) - 1)
    return math.sqrt(variance) / len(rewards)


def words_table():
    """A real model before and after training, run by run, and means over seeds."""
    groups = {}
    for log in read_runs("smollm"):
        groups.setdefault((log.config["group_size"], SCRIPTS.index(log.script)), []).append(log)
    rows = []
    for (G, number), logs in sorted(groups.items()):
        name = f"{SCRIPTS[number]}.py"
        ends = []
        for log in sorted(logs, key=lambda log: log.config["seed"]):
            first, last = log.evals[0], log.evals[-1]
            error = error_over_pairs(last["problem_rewards"])
            ends.append(last["eval_accuracy"])
            numbers = [first["eval_accuracy"], ends[-1], error, first["boxed"], last["boxed"]]
            rows.append([name, G, log.config["seed"], *(f"{x:.3f}" for x in numbers)])
        if len(ends) > 1:
            error = f"{stdev(ends) / math.sqrt(len(ends)):.3f} over seeds"
            end = [f"{fmean(ends):.3f}", error, "", ""]
            rows.append([f"{name}, mean", G, f"{len(ends)} seeds", "", *end])
    columns = ["accuracy before", "accuracy after", "standard error over problems"]
    columns += ["boxes before", "boxes after"]
    return markdown(["script", "G", "seed", *columns], rows)


def results():
    """{name of a part of docs/results.md: its table}."""
    return {
        "tiny": tiny_tables()[1],
        "map": map_table(),
        "weak": weak_table(),
        "skill": skill_table(),
        "stall": stall_table(),
        "lengths": lengths_table(),
        "words": words_table(),
    }


if __name__ == "__main__":
    print("\n\n".join([tiny_tables()[0], *results().values()]))
