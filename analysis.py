"""The papers' claims, measured and drawn; and two scripts side by side.

    python analysis.py curves RUN ...         training curves: mean and spread over seeds
    python analysis.py lengths RUN ...        length of right and of wrong responses during training
    python analysis.py map RUN ...            final accuracy and collapses, by base, G and algorithm
    python analysis.py diff grpo.py mine.py   two scripts side by side, as one HTML page
    python analysis.py degeneracy             zero-variance groups against an i.i.d. prediction
    python analysis.py rank                   the effective rank of GRPO's gradient
    python analysis.py share                  what short and long responses add to the gradient
    python analysis.py tokens                 what EP-GRPO sees in one response, token by token
    python analysis.py passk --model tests/tiny runs/grpo      pass@k before and after training

A RUN is a run's folder, or a .jsonl file with many runs, such as docs/runs/tiny.jsonl. The other
commands take `--model`: a hub name, a folder, or a run. A run stands for its latest checkpoint and
brings its own problems and flags. Without `--model` they use the tiny model in tests/tiny.

All commands but `diff` print tables and draw one picture, in runs/ unless `--output` is given.
Standard errors are over problems, standard deviations over seeds.
"""

import argparse
import fnmatch
import hashlib
import itertools
import json
import math
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import probes
import side_by_side
from common import BadInput

# Okabe and Ito's colours, which any kind of colour vision tells apart: one per algorithm.
COLOURS = {
    "grpo": "#0072B2",
    "dr_grpo": "#D55E00",
    "sign_grpo": "#009E73",
    "length_alpha": "#CC79A7",
    "ep_grpo": "#E69F00",
}
SPARE_COLOURS = ["#56B4E9", "#8C564B", "#000000", "#999933"]  # for scripts of your own
plt.rcParams.update({
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": matplotlib.cycler(color=[*COLOURS.values(), *SPARE_COLOURS]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
})  # fmt: skip


# --- the logs of runs ---
# Flags that may differ within one curve: they do not change what is learned.
FREE = {
    "device",
    "eval_every",
    "gradient_checkpointing",
    "log_completions_every",
    "micro_batch_tokens",
    "output_dir",
    "resume",
    "save_every",
    "seed",
}
SHORT = {"group_size": "G", "alpha": "α", "progress_weight": "λ", "learning_rate": "lr"}


class Log:
    """What a run has logged. Evaluations of other problems than the run's own are left out."""

    def __init__(self, place, name, config, lines, source=None):
        self.place = place  # where it was read, for messages
        self.name = name  # its folder's name
        self.config = config  # its flags, and "script"
        self.lines = lines  # all of metrics.jsonl
        self.source = source  # a hash of its script: two scripts may share a name
        self.script = config["script"]
        self.train = [add_gap(line) for line in lines if "reward" in line]
        self.evals = [x for x in lines if "eval_accuracy" in x and "eval_dataset" not in x]


def add_gap(line):
    if line.get("degenerate_iid") is None:
        return line
    return {**line, "gap": line["degenerate_frac"] - line["degenerate_iid"]}


def read_logs(names, patterns=None):
    """The logs named by folders and packed files; a run without a training step is skipped."""
    logs = []
    for path in map(Path, names):
        if path.suffix == ".jsonl":
            logs += read_packed(path)
        elif not path.exists():
            raise BadInput(f"{path} does not exist: give a run's folder or a packed .jsonl file")
        elif (path / "metrics.jsonl").exists():
            logs.append(read_folder(path))
        elif path.is_dir():  # runs/* holds pictures too, which need no mention
            print(f"{path} is not a run's folder, skipped", file=sys.stderr)
    if patterns:
        logs = [log for log in logs if any(fnmatch.fnmatch(log.name, p) for p in patterns)]
    return keep_logs(lambda log: log.train, logs, "has no training step yet")


def keep_logs(is_usable, logs, reason):
    """The usable logs; the others are named and skipped. BadInput if none is usable."""
    for log in logs:
        if not is_usable(log):
            print(f"{log.place} {reason}, skipped", file=sys.stderr)
    logs = [log for log in logs if is_usable(log)]
    if not logs:
        raise BadInput("none of the runs can be used: give others, or check --only")
    return logs


def read_folder(folder):
    """The log in a run's folder, with the response lengths of its evaluations."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        texts = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        lines = [json.loads(text) for text in texts if text.endswith("}")]  # the last may be cut
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read the run in {folder}: {error}") from error
    if "script" not in config:
        raise BadInput(f"{folder / 'config.json'} does not name its script: not a run's folder")
    for line in lines:
        samples = folder / f"eval-{line['step']}.jsonl"
        if "eval_accuracy" in line and "eval_dataset" not in line and samples.exists():
            line |= count_lengths(samples)
    script = folder / f"{config['script']}.py"
    source = None
    if script.exists():
        source = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    return Log(str(folder), folder.resolve().name, config, lines, source)


def count_lengths(path):
    """{"lengths_right": [[tokens, responses], ...], "lengths_wrong": ...} of an evaluation."""
    counts = {"lengths_right": Counter(), "lengths_wrong": Counter()}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            for reward, length in zip(line["rewards"], line["lengths"], strict=True):
                counts["lengths_right" if reward >= 1 else "lengths_wrong"][length] += 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read rewards and lengths in {path}: {error}") from error
    return {key: sorted(map(list, count.items())) for key, count in counts.items()}


def read_packed(path):
    """The logs in a file that tests/tools/pack_runs.py has made."""
    heads = {}
    lines = {}
    number = 0
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            name = line.pop("run")
            if "config" in line:
                heads[name] = line
                lines[name] = []
            else:
                lines[name].append(line)
        return [
            Log(f"{path}: {name}", name, head["config"], lines[name], head.get("source"))
            for name, head in heads.items()
        ]
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path}: line {number} is not one of packed runs: {error}") from error


def split_logs(logs):
    """Lists of logs that differ in their seed only; a seed met twice means different scripts."""
    groups = {}
    for log in sorted(logs, key=lambda log: [*COLOURS, log.script].index(log.script)):
        settings = {key: value for key, value in log.config.items() if key not in FREE}
        groups.setdefault(json.dumps([settings, log.source], sort_keys=True), []).append(log)
    result = []
    for group in groups.values():
        refuse_copies(group)
        seeds = {log.config.get("seed") for log in group}
        result += [group] if len(seeds) == len(group) else [[log] for log in group]
    return result


def group_logs(logs):
    """{label: logs that differ in their seed only}.

    A label names the script and the flags that differ among the logs. Where this leaves two groups
    with the same label (two scripts of one name, say) it adds their folders.
    """
    groups = split_logs(logs)
    labels = [describe(group[0], logs) for group in groups]
    for i in [i for i, label in enumerate(labels) if labels.count(label) > 1]:
        places = [log.place for log in groups[i]]
        labels[i] += f" ({os.path.commonprefix(places).rstrip('_-. ')})"
    return dict(zip(labels, groups, strict=True))


def refuse_copies(logs):
    """BadInput if two of the logs hold the same numbers: they would count as two seeds."""
    for one, other in itertools.combinations(logs, 2):
        numbers = [[(line["reward"], line.get("loss")) for line in x.train] for x in (one, other)]
        if numbers[0] == numbers[1]:
            raise BadInput(f"{one.place} and {other.place} hold the same numbers: give only one")


def describe(log, logs, hidden=()):
    """The script of a log, and those flags, but for hidden ones, on which not all logs agree."""
    label = log.script
    for key in sorted(log.config.keys() - FREE - set(hidden) - {"script"}):
        values = {json.dumps(other.config[key]) for other in logs if key in other.config}
        value = log.config[key]
        if len(values) == 1 or value is True:
            continue
        if value is False:
            label += f" no {key}"
            continue
        paths = [json.loads(text) for text in values]
        if all(path is None or isinstance(path, str) for path in paths):
            ends = {Path(path or "").name[:24] for path in paths}
            if len(ends) == len(values):  # the ends of the paths tell them apart
                value = Path(value or "").name[:24]
        label += f" {SHORT.get(key, key)}={value}"
    return label


def choose_colours(labels):
    """{label: colour}: the algorithm's own, paler for each further variant of it."""
    names = list(dict.fromkeys(label.split()[0] for label in labels))
    known = dict(COLOURS)
    for i, name in enumerate(name for name in names if name not in COLOURS):
        known[name] = SPARE_COLOURS[i % len(SPARE_COLOURS)]
    result = {}
    for label in labels:
        name = label.split()[0]
        variants = [other for other in labels if other.split()[0] == name]
        pale = 0.6 * variants.index(label) / max(1, len(variants) - 1)
        result[label] = tuple(np.array(matplotlib.colors.to_rgb(known[name])) * (1 - pale) + pale)
    return result


def read_series(log, key, window=1):
    """{step: running mean of a logged number over `window` steps}; evaluations have no window."""
    lines = log.train
    if any(key in line for line in log.evals):
        lines = log.evals
        window = 1
    lines = [line for line in lines if line.get(key) is not None]
    values = np.array([line[key] for line in lines])
    return {
        line["step"]: float(values[max(0, i + 1 - window) : i + 1].mean())
        for i, line in enumerate(lines)
    }


def plot_mean(axis, logs, key, colour, window=1, **style):
    """Mean over seeds, and a band of one standard deviation, at the steps that all seeds have."""
    curves = [read_series(log, key, window) for log in logs]
    steps = sorted(set.intersection(*map(set, curves)))
    y = np.array([[curve[step] for step in steps] for curve in curves])  # (seeds, steps)
    axis.plot(steps, y.mean(0), color=colour, **style)
    if len(logs) > 1 and steps:
        deviation = y.std(0, ddof=1)
        low = y.mean(0) - deviation
        if axis.get_yscale() == "log":  # such an axis has no 0
            low = np.maximum(low, y.min(0))
        axis.fill_between(steps, low, y.mean(0) + deviation, color=colour, alpha=0.15, linewidth=0)


def make_panels(titles, columns=3):
    """A figure and {key: axis}, with a title over each panel."""
    columns = min(columns, len(titles))
    rows = math.ceil(len(titles) / columns)
    size = (3 * columns if columns > 1 else 4.5, 2.6 * rows if rows > 1 else 3.2)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    panels = dict(zip(titles, axes.flat))
    for key, axis in panels.items():
        axis.set_title(titles[key])
        axis.set_xlabel("step")
    for axis in axes.flat[len(titles) :]:
        axis.axis("off")
    return figure, panels


def add_legend(figure, groups, note):
    """One legend under all panels: a line per group, with its number of seeds."""
    colours = choose_colours(list(groups))
    handles = [
        matplotlib.lines.Line2D([], [], color=colours[label], linewidth=2.5)
        for label in groups
    ]
    texts = [f"{label} ({len(logs)})" for label, logs in groups.items()]
    title = f"Lines: mean over seeds (their number in brackets). {note}"
    columns = min(len(groups), 5 if max(map(len, texts)) < 24 else 2)
    figure.legend(
        handles, texts, loc="outside lower center", ncols=columns, title=title, title_fontsize=8
    )


# --- curves ---
PANELS = {
    "reward": "reward",
    "eval_accuracy": "held-out accuracy",
    "completion_len": "response length, tokens",
    "entropy": "entropy, nats",
    "gap": "zero-variance groups − i.i.d.",
    "grad_norm": "gradient norm",
}


def draw_curves(options):
    """Training curves of runs: one per setting, mean and spread over its seeds.

    Claims: the sign baseline beats the group mean by 45.4 points at G = 4 (Sign paper: 9B model,
    GSM8K, 7 seeds); EP-GRPO beats GRPO by 4.8 points (EP-GRPO paper: 3B model).
    """
    logs = read_logs(options.runs, options.only)
    keys = [key.strip() for key in options.keys.split(",")]
    check_keys(keys, logs)
    groups = group_logs(logs)
    figure, panels = make_panels({key: PANELS.get(key, key) for key in keys})
    if "grad_norm" in panels:
        panels["grad_norm"].set_yscale("log")
        panels["grad_norm"].yaxis.set_major_formatter("{x:g}")
    if "gap" in panels:
        panels["gap"].axhline(0, color="black", linestyle="--", linewidth=1)
    for label, colour in choose_colours(groups).items():
        for key, axis in panels.items():
            plot_mean(axis, groups[label], key, colour, options.smooth)
    smoothed = f" Per-step numbers: means over {options.smooth} steps." * (options.smooth > 1)
    add_legend(figure, groups, f"Bands: one standard deviation.{smoothed}")

    steps = shared_evaluations(logs)
    extra = [key for key in keys if key not in PANELS]
    tables = [tabulate_curves(groups, steps, extra)]
    if steps and steps[-1] > 0:
        tables += compare_scripts(groups, options.against, steps[-1])
    return tables, figure


def check_keys(keys, logs):
    """BadInput if a key is not a number that some run has logged."""
    lines = [line for log in logs for line in log.train + log.evals]
    known = set(PANELS)
    for line in lines:
        known |= {key for key, value in line.items() if isinstance(value, (int, float))}
    for key in keys:
        if key not in known:
            raise BadInput(f"--keys: no run has logged a number {key!r}, only {sorted(known)}")


def shared_evaluations(logs):
    """The first and the last step at which every evaluated run has an accuracy."""
    steps = [{line["step"] for line in log.evals} for log in logs if log.evals]
    common = set.intersection(*steps) if steps else set()
    return sorted({min(common), max(common)}) if common else []


def tabulate_curves(groups, steps, extra):
    """A table with a row per curve: accuracies, and means over all steps."""
    keys = ["completion_len", "degenerate_frac", "degenerate_iid", *extra]
    header = ["runs", "seeds", "steps"]
    for step in steps:
        header += [f"accuracy at step {step}", "sd"]
    rows = []
    for label, logs in groups.items():
        row = [label, len(logs), max(line["step"] for log in logs for line in log.train)]
        for step in steps:
            accuracies = accuracies_at(logs, step)
            row.append(float(np.mean(accuracies)) if accuracies else None)
            row.append(float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None)
        rows.append(row + [mean_of(logs, key) for key in keys])
    return "", header + [f"mean {key}" for key in keys], rows


def accuracies_at(logs, step):
    found = [read_series(log, "eval_accuracy").get(step) for log in logs]
    return [accuracy for accuracy in found if accuracy is not None]


def mean_of(logs, key):
    """Mean of a logged number over all lines of all logs; None where it was not logged."""
    lines = [line for log in logs for line in log.train + log.evals]
    values = [line[key] for line in lines if line.get(key) is not None]
    return float(np.mean(values)) if values else None


def compare_scripts(groups, name, step):
    """How far each curve ends from those of script `name` with the same common flags."""
    rows = []
    for (label, logs), (other, others) in itertools.product(groups.items(), repeat=2):
        if others[0].script != name or logs[0].script == name:
            continue
        common = (logs[0].config.keys() & others[0].config.keys()) - FREE - {"script"}
        a = accuracies_at(logs, step)
        b = accuracies_at(others, step)
        if a and b and all(logs[0].config[key] == others[0].config[key] for key in common):
            points = f"{100 * (np.mean(a) - np.mean(b)):+.1f}"
            mirrored = 2 if len(a) == len(b) else 1  # then the opposite split is as extreme
            least = mirrored / math.comb(len(a) + len(b), len(a))
            rows.append([label, other, points, permutation_p(a, b), least])
    caption = (
        f"Differences in accuracy at step {step}. p: exact permutation test over seeds, beside the "
        "smallest p that so few seeds can reach."
    )
    header = ["runs", "minus", "points", "p", "smallest possible p"]
    return [(caption, header, rows)] if rows else []


def permutation_p(a, b):
    """Exact two-sided p-value: the share of all ways to split the values that differ as much."""
    values = [*a, *b]
    total = sum(values)
    splits = itertools.combinations(values, len(a))
    gaps = [abs(sum(one) / len(a) - (total - sum(one)) / len(b)) for one in splits]
    return float(np.mean(np.array(gaps) >= abs(np.mean(a) - np.mean(b)) - 1e-12))


# --- lengths ---
def draw_lengths(options):
    """Length of right and of wrong responses during training, from the evaluations.

    Claim (Dr. GRPO paper): a weight of 1/L makes wrong responses grow; a constant weight does not.
    """
    logs = read_logs(options.runs, options.only)
    for log in logs:
        log.evals = [line for line in log.evals if "lengths_right" in line]
    logs = keep_logs(lambda log: log.evals, logs, "has no evaluation that recorded lengths")
    counts = [log.evals[0][f"lengths_{kind}"] for log in logs for kind in ("right", "wrong")]
    long = options.long or round(weighted_mean(sum(counts, []), lambda length: length))
    for line in (line for log in logs for line in log.evals):
        for kind in ("right", "wrong"):
            counts = line[f"lengths_{kind}"]
            line[f"mean_{kind}"] = weighted_mean(counts, lambda length: length)
            line[f"long_{kind}"] = weighted_mean(counts, lambda length: length > long)
    groups = group_logs(logs)
    figure, panels = make_panels({
        "mean_right": "right responses, mean tokens",
        "mean_wrong": "wrong responses, mean tokens",
        "long_wrong": f"share of wrong ones over {long} tokens",
    })  # fmt: skip
    panels["mean_wrong"].sharey(panels["mean_right"])
    for label, colour in choose_colours(groups).items():
        for key, axis in panels.items():
            plot_mean(axis, groups[label], key, colour)
    add_legend(figure, groups, "Bands: one standard deviation.")
    return [tabulate_lengths(groups, long)], figure


def weighted_mean(counts, value):
    """Mean of value(length) over [[length, responses], ...]; None without responses."""
    total = sum(count for _, count in counts)
    return sum(value(length) * count for length, count in counts) / total if total else None


def tabulate_lengths(groups, long):
    """A table with two rows per curve, its first and its last evaluation."""
    keys = ["mean_right", "long_right", "mean_wrong", "long_wrong"]
    rows = []
    for label, logs in groups.items():
        for end in (0, -1):
            lines = [log.evals[end] for log in logs]
            row = [label, len(logs), max(line["step"] for line in lines)]
            for key in keys:
                values = [line[key] for line in lines if line[key] is not None]
                row.append(float(np.mean(values)) if values else None)
            rows.append(row)
    caption = f"Means over seeds at the first and the last evaluation. Long: over {long} tokens."
    names = ["right: tokens", "right: share long", "wrong: tokens", "wrong: share long"]
    return caption, ["runs", "seeds", "step", *names], rows


# --- map ---
# What a row of the map stands for. The other flags that differ name its columns.
MAP_ROWS = {"model", "dataset", "group_size"}
MAP_PANELS = {
    "accuracy": "final accuracy",
    "half": "steps to half of it",
    "collapsed": "share of runs that collapse",
    "gap": "zero-variance groups − i.i.d.",
}
MAP_TOPS = {"accuracy": 1, "collapsed": 1}  # where the colours end, if not at the largest number


def draw_map(options):
    """Final accuracy, speed, collapses and zero-variance groups, by base, G and algorithm.

    Claims (Sign paper): where the base is weak and G small, the group mean stalls and the sign
    baseline learns; there are more zero-variance groups than p^G + (1 - p)^G.
    """
    logs = read_logs(options.runs, options.only)
    evaluated = keep_logs(
        lambda log: len(log.evals) > 1 and log.evals[0]["step"] == 0,
        logs,
        "was not evaluated at step 0 and later",
    )
    cells = {}  # {(base and G, algorithm): logs}
    for group in split_logs(evaluated):
        row = name_base(group[0], evaluated)
        column = describe(group[0], evaluated, MAP_ROWS)
        if (row, column) in cells:  # two scripts of one name
            column += f" ({group[0].place})"
        cells[row, column] = group
    numbers = {key: summarize_cell(cells[key]) for key in sorted(cells, key=order_of_cell)}
    caption = (
        "Means over seeds. Collapse: a run ends over a point below half of its best accuracy. "
        "Steps to half of the final accuracy are those of the others."
    )
    header = ["base and G", "algorithm", "seeds", *MAP_PANELS.values(), "zero-variance groups"]
    rows = [[*key, len(cells[key]), *numbers[key].values()] for key in numbers]
    return [(caption, header, rows)], plot_map(numbers)


def name_base(log, logs):
    """The base of a log, by its mean accuracy at step 0 over all runs from it, and the log's G."""
    bases = {}
    for other in logs:
        key = str(other.config.get("model")), str(other.config.get("dataset"))
        bases.setdefault(key, []).append(other.evals[0]["eval_accuracy"])
    names = {key: f"base {100 * np.mean(values):.1f} %" for key, values in bases.items()}
    key = str(log.config.get("model")), str(log.config.get("dataset"))
    name = names[key]
    if list(names.values()).count(name) > 1:
        name += " " + ", ".join(key)
    return f"{name}, G = {log.config.get('group_size')}"


def order_of_cell(key):
    """By base, then by G; the algorithms stay in their order."""
    return float(key[0].split()[1]), int(key[0].split()[-1])


def summarize_cell(logs):
    """The numbers of one cell of the map, means over its runs."""
    finals = []
    halves = []
    for log in logs:
        accuracies = [line["eval_accuracy"] for line in log.evals]
        finals.append(accuracies[-1])
        if accuracies[-1] >= max(accuracies) / 2 - 0.01:
            half = [line for line in log.evals if line["eval_accuracy"] >= accuracies[-1] / 2]
            halves.append(half[0]["step"])
    return {
        "accuracy": float(np.mean(finals)),
        "half": float(np.mean(halves)) if halves else None,
        "collapsed": 1 - len(halves) / len(logs),
        "gap": mean_of(logs, "gap"),
        "zero_variance": mean_of(logs, "degenerate_frac"),
    }


def plot_map(numbers):
    """A heat map per number: a row per base and G, a column per algorithm."""
    rows = list(dict.fromkeys(row for row, _ in numbers))
    columns = list(dict.fromkeys(column for _, column in numbers))
    size = (3 + 2 * max(1.5, 0.7 * len(columns)), 2 + 0.6 * len(rows))
    figure, axes = plt.subplots(2, 2, figsize=size, sharex=True, sharey=True)
    for axis, (name, title) in zip(axes.flat, MAP_PANELS.items()):
        values = np.full((len(rows), len(columns)), math.nan)
        for (row, column), cell in numbers.items():
            if cell[name] is not None:
                values[rows.index(row), columns.index(column)] = cell[name]
        image = axis.imshow(values, aspect="auto", vmin=0, vmax=MAP_TOPS.get(name))
        for (y, x), value in np.ndenumerate(values):
            if not math.isnan(value):
                ink = probes.readable_ink(np.array(image.to_rgba(value)[:3]))
                text = f"{value:.0f}" if name == "half" else f"{value:.2f}"
                axis.text(x, y, text, ha="center", va="center", color=ink, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set_yticks(range(len(rows)), rows)
        axis.grid(False)
    return figure


# --- the command line ---
def print_table(caption, header, rows):
    """A Markdown table: three digits per float, a dash where there is no number."""
    if caption:
        print(f"{caption}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(format_cell(value) for value in row) + " |")
    print()


def format_cell(value):
    if value is None or isinstance(value, float) and math.isnan(value):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2g}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def save_picture(figure, path):
    """Save the picture, as .png if the path has no ending; returns its path."""
    path = path if path.suffix else Path(f"{path}.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write the picture --output {path}: {error}") from error
    plt.close(figure)
    return path


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def parse_options(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, function, text=None):
        text = text or function.__doc__
        command = commands.add_parser(name, help=text.split("\n")[0], description=text)
        command.set_defaults(function=function)
        command.add_argument("--output", "--out", help="the file to write (default: in runs/)")
        return command

    def add_logs(name, function):
        command = add(name, function)
        command.add_argument("runs", nargs="+", help="run folders, or packed .jsonl files")
        command.add_argument("--only", nargs="+", help="patterns of run names, such as '*_G8_*'")
        return command

    curves = add_logs("curves", draw_curves)
    curves.add_argument("--keys", default=",".join(PANELS), help="logged numbers (default: six)")
    curves.add_argument("--smooth", type=positive, default=5, help="steps per mean (default: 5)")
    curves.add_argument("--against", default="grpo", help="script to compare with (grpo)")
    lengths = add_logs("lengths", draw_lengths)
    lengths.add_argument("--long", type=positive, help="tokens (default: the base's mean length)")
    add_logs("map", draw_map)
    diff = add("diff", None, "Two scripts side by side, as one HTML page.")
    diff.add_argument("scripts", nargs="*", help="the first beside each other one (default: all)")
    probes.add_commands(add)
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_options(argv)
    if options.command == "diff":
        print(f"Page: {side_by_side.write_page(options.scripts, options.output)}")
        return
    tables, figure = options.function(options)
    for table in tables:
        print_table(*table)
    path = save_picture(figure, Path(options.output or f"runs/{options.command}.png"))
    claim = options.function.__doc__.partition("\n\n")[2]
    print(f"{' '.join(claim.split())}\nPicture: {path}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Glyph")  # a token that matplotlib's font lacks
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
