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

A RUN is a run's folder, or a .jsonl file with many runs, such as docs/runs/tiny.jsonl. The last
five commands take `--model`: a hub name, a folder, or a run. A run stands for its latest checkpoint
and brings its own problems and flags. Without `--model` they use the tiny model in tests/tiny. They
pass the flags that they do not know on to the script: `--temperature 0.7`, for example.

All commands but `diff` print tables and draw one picture, in runs/ unless `--output` is given.
Standard errors are over problems, standard deviations over seeds.
"""

import argparse
import ast
import dataclasses
import difflib
import fnmatch
import hashlib
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections import Counter
from html import escape
from pathlib import Path

import grpo  # before torch: common sets up torch's memory allocator
import ep_grpo
import length_alpha
import matplotlib
import numpy as np
import torch
from common import BadInput, check_flags, load_model, locate, parse_args, saved_steps
from common import token_logps_and_entropies
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent
# Okabe and Ito's colours, which any kind of colour vision tells apart: one per algorithm.
COLOURS = {
    "grpo": "#0072B2",
    "dr_grpo": "#D55E00",
    "sign_grpo": "#009E73",
    "length_alpha": "#CC79A7",
    "ep_grpo": "#E69F00",
}
SPARE_COLOURS = ["#56B4E9", "#8C564B", "#000000", "#999933"]  # for scripts of your own
DASHED = {"color": "black", "linestyle": "--", "linewidth": 1}  # a line to compare with
plt.rcParams.update({
    "axes.grid": True,
    "axes.prop_cycle": matplotlib.cycler(color=[*COLOURS.values(), *SPARE_COLOURS]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "savefig.dpi": 150,
})  # fmt: skip


def mean(values):
    """The mean of those values that are not None; None without any."""
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else None


# --- the logs of runs ---
SMOOTH = 5  # steps per point of a curve
# Flags that may differ within one curve: they do not change what is learned.
FREE = set("device eval_every gradient_checkpointing micro_batch_tokens "
           "output_dir resume save_every seed".split())  # fmt: skip
SHORT = {"group_size": "G", "alpha": "α", "progress_weight": "λ", "learning_rate": "lr"}


@dataclasses.dataclass
class Log:
    """What a run has logged."""

    place: str  # where it was read, for messages
    name: str  # its folder's name
    config: dict  # its flags, and "script"
    source: str = None  # a hash of its script: two scripts may share a name
    lines: list = dataclasses.field(default_factory=list)  # all of metrics.jsonl
    train: list = dataclasses.field(default_factory=list)  # the training steps
    evals: list = dataclasses.field(default_factory=list)  # evaluations on its own problems

    def __post_init__(self):
        self.script = self.config.get("script") if isinstance(self.config, dict) else None
        if not isinstance(self.script, str) or not self.script:
            raise BadInput(f"{self.place} does not name its script: not a run")

    def add(self, line):
        keys = ("reward", "eval_accuracy", "degenerate_frac", "degenerate_iid")
        known = all(isinstance(line.get(key), (int, float, type(None))) for key in keys)
        if not known or not isinstance(line.get("step"), int):
            raise BadInput(f"{self.place}: not a line of metrics.jsonl: {str(line)[:60]}")
        self.lines.append(line)
        if line.get("eval_accuracy") is not None and "eval_dataset" not in line:
            self.evals.append(line)
        if line.get("reward") is not None:
            gap = None
            if line.get("degenerate_iid") is not None:
                gap = line.get("degenerate_frac", math.nan) - line["degenerate_iid"]
            self.train.append({**line, "gap": gap})


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


def read_json(path):
    """What a .json file holds. Of a .jsonl file a list, without a last line that is cut off."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return json.loads(text)
    except (OSError, RecursionError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def read_folder(folder):
    """The log in a run's folder, with the response lengths of its evaluations."""
    folder = Path(folder)
    log = Log(str(folder), folder.resolve().name, read_json(folder / "config.json"))
    script = folder / f"{log.script}.py"
    if script.exists():
        log.source = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    for line in read_json(folder / "metrics.jsonl"):
        log.add(line)
    for line in log.evals:
        samples = folder / f"eval-{line['step']}.jsonl"
        if samples.exists():
            line |= count_lengths(samples)
    return log


def count_lengths(path):
    """{"lengths_right": [[tokens, responses], ...], "lengths_wrong": ...} of an evaluation."""
    counts = {"lengths_right": Counter(), "lengths_wrong": Counter()}
    try:
        for line in read_json(path):
            for reward, length in zip(line["rewards"], line["lengths"], strict=True):
                counts["lengths_right" if reward >= 1 else "lengths_wrong"][int(length)] += 1
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read rewards and lengths in {path}: {error}") from error
    return {key: sorted(map(list, count.items())) for key, count in counts.items()}


def read_packed(path):
    """The logs in a file that tests/tools/pack_runs.py has made."""
    logs = {}
    for number, line in enumerate(read_json(path), 1):
        name = str(line.pop("run", None))
        if "config" in line:
            logs[name] = Log(f"{path}: {name}", name, line["config"], line.get("source"))
        elif name in logs:
            logs[name].add(line)
        else:
            raise BadInput(f"{path}: line {number} belongs to none of the packed runs above it")
    return list(logs.values())


def split_logs(logs):
    """Lists of logs that differ in their seed only; a seed met twice means different scripts."""
    groups = {}
    for log in sorted(logs, key=lambda log: [*COLOURS, log.script].index(log.script)):
        settings = {key: value for key, value in log.config.items() if key not in FREE}
        groups.setdefault(json.dumps([settings, log.source], sort_keys=True), []).append(log)
    result = []
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            if without_seconds(one) == without_seconds(other):
                raise BadInput(f"{one.place} and {other.place} hold the same numbers: give one")
        seeds = {log.config.get("seed") for log in group}
        result += [group] if len(seeds) == len(group) else [[log] for log in group]
    return result


def without_seconds(log):
    """A log's lines without the times, in which two copies of one run would differ too."""
    lines = []
    for line in log.lines:
        lines.append({key: x for key, x in line.items() if not key.startswith("seconds_")})
    return lines


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


def describe(log, logs, hidden=()):
    """The script of a log, and the flags whose values differ among the logs, but hidden ones."""
    label = log.script
    for key in sorted(log.config.keys() - FREE - set(hidden) - {"script"}):
        values = {str(other.config[key]) for other in logs if key in other.config}
        value = log.config[key]
        if len(values) == 1 or value is True:
            continue
        if value is False:
            label += f" no {key}"
            continue
        ends = {Path(text).name[:24] for text in values}
        if len(ends) == len(values):  # the ends of the paths tell them apart
            value = Path(str(value)).name[:24]
        label += f" {SHORT.get(key, key)}={value}"
    return label


def choose_colours(labels):
    """{label: colour}: the algorithm's own, paler for each further variant of it."""
    known = dict(COLOURS)
    result = {}
    for label in labels:
        name = label.split()[0]
        colour = known.setdefault(name, SPARE_COLOURS[len(known) % len(SPARE_COLOURS)])
        variants = sorted(other for other in labels if other.split()[0] == name)
        pale = 0.6 * variants.index(label) / max(1, len(variants) - 1)
        result[label] = tuple(np.array(matplotlib.colors.to_rgb(colour)) * (1 - pale) + pale)
    return result


def logged(logs, key):
    """All values of a logged number."""
    return [line.get(key) for log in logs for line in log.train + log.evals]


def read_series(log, key):
    """{step: a logged number}; for a number of the training steps a mean over SMOOTH of them."""
    evals = {line["step"]: line[key] for line in log.evals if line.get(key) is not None}
    train = {line["step"]: line[key] for line in log.train if line.get(key) is not None}
    values = list(train.values())
    means = [mean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]
    return evals or dict(zip(train, means))


def plot_mean(axis, logs, key, colour):
    """Mean over seeds, and a band of one standard deviation, at the steps that all seeds have."""
    curves = [read_series(log, key) for log in logs]
    steps = sorted(set.intersection(*map(set, curves)))
    y = np.array([[curve[step] for step in steps] for curve in curves])  # (seeds, steps)
    style = {"marker": "o", "linestyle": ":"} if len(steps) < 4 else {}  # nothing known between
    axis.plot(steps, y.mean(0), color=colour, **style)
    if len(logs) > 1 and steps:
        deviation = y.std(0, ddof=1)
        low = y.mean(0) - deviation
        if axis.get_yscale() == "log":  # such an axis has no 0
            low = np.maximum(low, y.min(0))
        axis.fill_between(steps, low, y.mean(0) + deviation, color=colour, alpha=0.15, linewidth=0)


def plot_panels(titles, groups, note=""):
    """A figure with a panel per logged number and a line per group, and one legend under them."""
    columns = min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    size = (3 * columns if columns > 1 else 4.5, 2.6 * rows if rows > 1 else 3.2)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    colours = choose_colours(groups)
    for axis, (key, title) in zip(axes.flat, titles.items()):
        axis.set(title=title, xlabel="step")
        if key == "grad_norm":
            axis.set_yscale("log", nonpositive="mask")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_formatter("")
        if key == "gap":
            axis.axhline(0, **DASHED)
        if key == "mean_wrong":  # right and wrong lengths have one scale
            axis.sharey(axes[0, 0])
        for label, logs in groups.items():
            plot_mean(axis, logs, key, colours[label])
    for axis in axes.flat[len(titles) :]:
        axis.axis("off")
    handles = [plt.Line2D([], [], color=colours[label], linewidth=2.5) for label in groups]
    texts = [f"{label} ({len(logs)})" for label, logs in groups.items()]
    title = "Lines: mean over seeds (their number in brackets). Bands: one standard deviation."
    columns = min(len(groups), 5 if max(map(len, texts)) < 24 else 2)
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, title=title + note,
                  title_fontsize=8)  # fmt: skip
    return figure


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
    known = set(PANELS)
    for line in (line for log in logs for line in log.train + log.evals):
        known |= {key for key, value in line.items() if isinstance(value, (int, float))}
    for key in keys:
        if key not in known:
            raise BadInput(f"--keys: no run has logged a number {key!r}, only {sorted(known)}")
    groups = group_logs(logs)
    note = f" Per-step numbers: means over {SMOOTH} steps."
    figure = plot_panels({key: PANELS.get(key, key) for key in keys}, groups, note)
    evaluated = [{line["step"] for line in log.evals} for log in logs if log.evals]
    common = set.intersection(*evaluated) if evaluated else set()
    steps = sorted({min(common), max(common)}) if common else []
    tables = [tabulate_curves(groups, steps, [key for key in keys if key not in PANELS])]
    if steps and steps[-1] > 0:
        tables += compare_scripts(groups, options.against, steps[-1])
    return tables, figure


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
            deviation = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None
            row += [mean(accuracies), deviation]
        rows.append(row + [mean(logged(logs, key)) for key in keys])
    return "", header + [f"mean {key}" for key in keys], rows


def accuracies_at(logs, step):
    found = [read_series(log, "eval_accuracy").get(step) for log in logs]
    return [accuracy for accuracy in found if accuracy is not None]


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
            points = f"{100 * (mean(a) - mean(b)):+.1f}"
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
    return float(np.mean(np.array(gaps) >= abs(mean(a) - mean(b)) - 1e-12))


# --- lengths ---
def draw_lengths(options):
    """Length of right and of wrong responses during training, from the evaluations.

    Claim (Dr. GRPO paper): a weight of 1/L makes wrong responses grow; a constant weight does not.
    """
    logs = read_logs(options.runs, options.only)
    for log in logs:
        log.evals = [x for x in log.evals if x.get("lengths_right") or x.get("lengths_wrong")]
    logs = keep_logs(lambda log: log.evals, logs, "has no evaluation that recorded lengths")
    base = [log.evals[0][f"lengths_{kind}"] for log in logs for kind in ("right", "wrong")]
    long = round(mean(unpack_lengths(sum(base, []))))
    for line in (line for log in logs for line in log.evals):
        for kind in ("right", "wrong"):
            lengths = unpack_lengths(line[f"lengths_{kind}"])
            line[f"mean_{kind}"] = mean(lengths)
            line[f"long_{kind}"] = mean([length > long for length in lengths])
    groups = group_logs(logs)
    figure = plot_panels({
        "mean_right": "right responses, mean tokens",
        "mean_wrong": "wrong responses, mean tokens",
        "long_wrong": f"share of wrong ones over {long} tokens",
    }, groups)  # fmt: skip
    rows = []
    for label, logs in groups.items():
        for end in (0, -1):
            lines = [log.evals[end] for log in logs]
            row = [label, len(logs), max(line["step"] for line in lines)]
            for key in ("mean_right", "long_right", "mean_wrong", "long_wrong"):
                row.append(mean([line[key] for line in lines]))
            rows.append(row)
    caption = "Means over seeds at the first and the last evaluation. "
    caption += f"Long: over {long} tokens, the base's mean length."
    header = ["runs", "seeds", "step", "right: tokens", "right: share long"]
    return [(caption, header + ["wrong: tokens", "wrong: share long"], rows)], figure


def unpack_lengths(counts):
    """A length per response, from [[length, responses], ...]."""
    return [length for length, count in counts for _ in range(count)]


# --- map ---
# What a row of the map stands for. The other flags that differ name its columns.
MAP_ROWS = {"model", "dataset", "group_size"}
MAP_PANELS = {
    "accuracy": "final accuracy",
    "half": "steps until the reward is half of it",
    "collapsed": "share of runs that collapse, if any",
    "gap": "zero-variance groups − i.i.d.",
}
MAP_TOPS = {"accuracy": 1, "collapsed": 1}  # where the colours end, if not at the largest number


def draw_map(options):
    """Final accuracy, speed, collapses and zero-variance groups, by base, G and algorithm.

    Claims (Sign paper): where the base is weak and G small, the group mean stalls and the sign
    baseline learns; there are more zero-variance groups than p^G + (1 - p)^G.
    """
    logs = keep_logs(
        lambda log: len(log.evals) > 1 and log.evals[0]["step"] == 0,
        read_logs(options.runs, options.only),
        "was not evaluated at step 0 and later",
    )
    cells = {}  # {(base and G, algorithm): numbers}
    rows = []
    for group in sorted(split_logs(logs), key=lambda group: describe_base(group[0], logs)):
        accuracy, G, model = describe_base(group[0], logs)
        row = f"{model} ({100 * accuracy:.1f} %), G = {G}"
        column = describe(group[0], logs, MAP_ROWS)
        if (row, column) in cells:  # two scripts of one name
            column += f" ({group[0].place})"
        cells[row, column] = summarize_cell(group)
        rows.append([row, column, len(group), *cells[row, column].values()])
    caption = (
        "Means over seeds. Collapse: a run ends over a point below half of its best accuracy. "
        "The others: steps until the training reward, as a mean over up to "
        f"{SMOOTH} steps, is half of the final accuracy, where that is at least 0.1."
    )
    header = ["base (accuracy) and G", "algorithm", "seeds", *MAP_PANELS.values()]
    return [(caption, header + ["zero-variance groups"], rows)], plot_map(cells)


def describe_base(log, logs):
    """(mean accuracy at step 0 over all runs of the same model on the same data, G, model)."""
    keys = ("model", "dataset")
    same = [x for x in logs if all(x.config.get(key) == log.config.get(key) for key in keys)]
    accuracy = mean([other.evals[0]["eval_accuracy"] for other in same])
    return accuracy, log.config.get("group_size", 0), Path(str(log.config.get("model"))).name


def summarize_cell(logs):
    """The numbers of one cell of the map, means over its runs."""
    finals = []
    halves = []
    for log in logs:
        accuracies = [line["eval_accuracy"] for line in log.evals]
        finals.append(accuracies[-1])
        if accuracies[-1] >= max(accuracies) / 2 - 0.01:
            rewards = read_series(log, "reward")
            halves.append(next((x for x in rewards if rewards[x] >= accuracies[-1] / 2), None))
    return {
        "accuracy": mean(finals),
        "half": mean(halves) if mean(finals) >= 0.1 else None,
        "collapsed": 1 - len(halves) / len(logs),
        "gap": mean(logged(logs, "gap")),
        "zero_variance": mean(logged(logs, "degenerate_frac")),
    }


def plot_map(cells):
    """A heat map per number: a row per base and G, a column per algorithm."""
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    size = (3 + 2 * max(1.5, 0.7 * len(columns)), 2 + 0.6 * len(rows))
    figure, axes = plt.subplots(2, 2, figsize=size, sharex=True, sharey=True)
    for axis, (name, title) in zip(axes.flat, MAP_PANELS.items()):
        values = np.full((len(rows), len(columns)), math.nan)
        for (row, column), cell in cells.items():
            if cell[name] is not None:
                values[rows.index(row), columns.index(column)] = cell[name]
        colours = "viridis" if name == "accuracy" else "viridis_r"
        image = axis.imshow(values, colours, aspect="auto", vmin=0, vmax=MAP_TOPS.get(name))
        for (y, x), value in np.ndenumerate(values):
            if not math.isnan(value) and (value > 0 or name != "collapsed"):
                ink = readable_ink(np.array(image.to_rgba(value)[:3]))
                text = f"{value:.0f}" if name == "half" else f"{value:.2f}"
                axis.text(x, y, text, ha="center", va="center", color=ink, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set_yticks(range(len(rows)), rows)
        axis.grid(False)
    figure.suptitle("Means over seeds. Bright is good.", fontsize=9)
    return figure


def readable_ink(colour):
    """Black or white, whichever can be read on an RGB colour."""
    return "black" if colour @ [0.3, 0.6, 0.1] > 0.45 else "white"


# --- diff: two scripts side by side ---
# The page needs nothing but a browser: its style stands inside it, and it has no scripts. The same
# files always give the same page.
SCRIPTS = ["grpo.py", "dr_grpo.py", "sign_grpo.py", "length_alpha.py", "ep_grpo.py"]
BLOCK = "# --- algorithm ---"  # the comment, at the margin, over what the scripts differ in
CONTEXT = 2  # equal lines shown around a change
STYLE = """
:root { color-scheme: light dark; --panel: rgb(128 128 128 / .12); --rule: rgb(128 128 128 / .4);
  --old: rgb(255 70 50 / .15); --new: rgb(40 190 80 / .15); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3, code, i { font: 12px/1.5 ui-monospace, monospace; }
h3 { font-size: 1rem; font-weight: 600; margin: 0; }
p { margin: .25rem 0 1rem; max-width: 70ch; }
code { white-space: pre-wrap; overflow-wrap: anywhere; padding-left: 4ch; text-indent: -4ch; }
fieldset { display: flex; flex-wrap: wrap; gap: .5rem; border: 0; margin: 0; padding: 0; }
label { border: 1px solid var(--rule); border-radius: 6px; padding: .3rem .7rem; cursor: pointer; }
label:has(:checked) { outline: 2px solid Highlight; }
@supports selector(:has(a)) { .pair { display: none; } }
.two { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); column-gap: 8px; }
.side { display: grid; grid-row: span var(--rows); grid-template-rows: subgrid; }
.about { padding: .5rem .75rem; background: var(--panel); border-radius: 6px; margin-bottom: 8px; }
.about code { display: block; }
.line { display: grid; grid-template-columns: 2.6rem minmax(0, 1fr); }
.both { grid-template-columns: 2.6rem 2.6rem minmax(0, 1fr); }
.line i { opacity: .65; text-align: right; padding-right: 1ch; user-select: none; }
.old, .old mark { background: var(--old); } .old i::after { content: "-"; }
.new, .new mark { background: var(--new); } .new i::after { content: "+"; }
.none { background: var(--panel); }
mark { color: inherit; }
details { border: 1px solid var(--rule); border-radius: 6px; margin: 6px 0; }
summary { cursor: pointer; padding: .2rem .75rem; font-size: .875rem; background: var(--panel); }
@media (max-width: 900px) { .two, .side { display: block; } .none { display: none; }
  .side + .side .about { margin-top: 1rem; } .same .side + .side { display: none; } }
"""


def write_page(options):
    """Two scripts side by side, as one HTML page: the first beside each of the others."""
    if len(options.scripts) == 1:
        raise BadInput("diff compares two scripts or more, the first with each of the others")
    page = make_page(options.scripts or [ROOT / name for name in SCRIPTS])
    default = "runs/side_by_side.html" if options.scripts else ROOT / "docs/side_by_side.html"
    return save(lambda path: path.write_text(page, encoding="utf-8"), options.output or default)


def make_page(paths):
    """The page as text: a pair for each script after the first, chosen by radio buttons."""
    first, *others = map(Script, paths)
    title = f"{first.name} and {others[0].name if len(others) == 1 else 'its variants'}"
    rules = []
    menu = []
    for i, other in enumerate(others):
        rules.append(f"body:has(#choose-{i}:checked) #pair-{i} {{ display: block; }}\n")
        checked = " checked" if i == 0 else ""
        button = f'<input type="radio" name="pair" id="choose-{i}"{checked}>'
        number = f"<small>{count_changes(first, other)} lines differ</small>"
        menu.append(f"<label>{button} {escape(other.name)} {number}</label>")
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}, side by side</title>",
        f"<style>{STYLE}{''.join(rules)}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}, side by side</h1>",
        "<p>Red lines stand only on the left, green ones only on the right. The words that differ "
        "are marked. Equal parts are folded: click to open them.</p>",
        f"<fieldset>\n<legend>Compare {escape(first.name)} with</legend>",
        *menu,
        "</fieldset>",
        *(make_pair(first, other, i) for i, other in enumerate(others)),
        "</body>\n</html>\n",
    ])  # fmt: skip


class Script:
    """A script cut into its docstring, its algorithm block and the rest: (number, text) lines."""

    def __init__(self, path):
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError) as error:
            raise BadInput(f"cannot read the script {path}: {error}") from error
        self.name = path.name if path.parent == ROOT else str(path)
        self.names = {node.lineno: node.name for node in tree.body if hasattr(node, "name")}
        self.about = ast.get_docstring(tree, clean=False) or ""
        lines = list(enumerate(text.splitlines(), 1))
        end = tree.body[0].end_lineno if self.about else 0
        banners = [i for i, line in lines if line.startswith("# --- ") and i > end]
        start = next((i for i in banners if lines[i - 1][1] == BLOCK), len(lines) + 1)
        stop = next((i for i in banners if i > start), len(lines) + 1)
        self.docstring = lines[:end]
        self.algorithm = lines[start - 1 : stop - 1]
        while self.algorithm and not self.algorithm[-1][1].strip():
            self.algorithm.pop()
        self.rest = lines[end : start - 1] + lines[stop - 1 :]

    def formula(self):
        """The docstring's first indented paragraph: a list of lines."""
        found = re.search(r"(?:^    .+\n?)+", self.about, re.MULTILINE)
        return [line[4:] for line in found.group().splitlines()] if found else []


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
        return list(itertools.zip_longest(left, right))
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
    pairs = align(first.rest + first.algorithm, other.rest + other.algorithm)
    return sum(line is not None for pair in pairs if not is_equal(pair) for line in pair)


def make_pair(first, other, number):
    """The comparison of two scripts: algorithm block, the rest, docstrings."""
    headings = [make_heading(first), make_heading(other)]
    return "\n".join([
        f'<section class="pair" id="pair-{number}">',
        "<h2>The algorithm</h2>",
        two_sides(align(first.algorithm, other.algorithm), headings),
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
    runs = itertools.groupby(enumerate(pairs), lambda x: (is_equal(x[1]), x[0] in shown))
    for (equal, near), run in runs:
        part = [pair for _, pair in run]
        if not equal:
            parts.append(two_sides(part))
        elif near or len(part) <= CONTEXT:
            parts.append(f'<div class="same">{two_sides(part)}</div>')
        else:  # once, with both line numbers, behind a summary that says what is in there
            held = ", ".join(names[a] for (a, _), _ in part if a in names)
            title = f"{len(part)} equal lines{': ' * bool(held)}{held}"
            parts.append(f"<details><summary>{title}</summary>")
            for (a, text), (b, _) in part:
                numbers = f"<i>{a}</i><i>{b}</i>"
                parts.append(f'<div class="line both">{numbers}<code>{escape(text)}</code></div>')
            parts.append("</details>")
    return parts


def two_sides(pairs, above=("", "")):
    """Pairs of lines as two columns, each under its heading."""
    cells = [list(cell) for cell in zip(*(make_cells(*pair) for pair in pairs))] or [[], []]
    parts = ['<div class="two">']
    for heading, side in zip(above, cells):
        rows = len(side) + bool(heading)
        parts += [f'<div class="side" style="--rows: {rows}">{heading}', *side, "</div>"]
    return "\n".join([*parts, "</div>"])


def make_cells(left, right):
    """The HTML of a line on the left and of its partner on the right."""
    if is_equal((left, right)):
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


# --- models and their responses ---
def find_model(name):
    """(what load_model takes, the flags of its run): {} for a model that is not one of our runs."""
    name = name or grpo.TINY_DIR
    folder = Path(name)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    try:
        config = read_json(run / "config.json")
    except BadInput:
        return name, {}
    if "script" not in config:
        return name, {}
    if run != folder:
        return name, config
    if not saved_steps(run):
        raise BadInput(f"the run in {run} has no checkpoint yet: give another --model")
    return str(run / f"checkpoint-{saved_steps(run)[-1]}"), config


def set_up(options, script=grpo, name=None, run=None, trainable=True):
    """(model, tokenizer, problems, args): the flags of the run, and over them those given here."""
    if options.samples < 2 or options.problems < 1:
        raise BadInput("--samples must be at least 2, and --problems at least 1")
    path, own = find_model(name or options.model)
    known = {field.name for field in dataclasses.fields(script.Args)}
    flags = {key: value for key, value in (run or own).items() if key in known}
    flags |= {"model": path, "eval_problems": options.problems, "steps": 0}
    if Path(path).resolve() == Path(grpo.TINY_DIR):
        del flags["model"]  # so that its own settings are the defaults
    argv = [f"--{key}={value}" for key, value in flags.items() if value is not None]
    args = parse_args(script.Args, script.TINY, argv + options.flags)
    check_flags(args, 1)
    graded = (run or own).get("script", "grpo")
    if graded not in COLOURS:
        print(f"rewards here are those of grpo.py, not of {graded}.py", file=sys.stderr)
    rank = args.lora_rank
    model, tokenizer = load_model(args.model, args.device, trainable, rank, args.seed)
    _, problems = script.load_problems(tokenizer, args)
    if not problems:
        raise BadInput("no held-out problem can be used: name others with --eval_dataset")
    return model, tokenizer, problems, args


def draw_groups(model, tokenizer, problems, samples, args):
    """Sample and reward responses to one problem after the other; yield a Batch for each."""
    for i, problem in enumerate(tqdm(problems, desc="sampling", leave=False, disable=None)):
        streams = [grpo.random_stream(args.seed, "evaluation", i)]
        batch = grpo.rollout(model, tokenizer, [problem], samples, args, streams)
        batch.rewards = grpo.grade(batch, [problem])  # (1, samples)
        yield batch


def count_right(options, name=None, run=None):
    """How many of the responses to each problem are right, (problems,) int."""
    model, tokenizer, problems, args = set_up(options, name=name, run=run, trainable=False)
    groups = draw_groups(model, tokenizer, problems, options.samples, args)
    return np.array([int((batch.rewards >= 1).sum()) for batch in groups])


def trained_weights(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def response_gradient(model, batch, row, coefficients, args):
    """Gradient of sum_t coefficients[row, t] log pi(token t of the row) in each trained weight."""
    used = batch.attention_mask[row].bool()
    length = int(batch.mask[row].sum())
    ids = batch.input_ids[row][used][None]  # (1, S + L) without padding
    logps, _ = token_logps_and_entropies(
        model, ids, torch.ones_like(ids), length, args.temperature)  # (1, L)  # fmt: skip
    total = (coefficients[row, :length] * logps[0]).sum()
    return torch.autograd.grad(total, trained_weights(model))


def mean_and_error(values):
    """Mean and standard error over problems; the error of a single value is NaN."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def use_powers_of_two(axis, ticks):
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, ticks)


# --- degeneracy ---
def zero_variance_share(n, c, size):
    """Unbiased chance that `size` of n responses, c of them right, are all right or all wrong."""
    return (math.comb(c, size) + math.comb(n - c, size)) / math.comb(n, size)


def measure_degeneracy(options):
    """Zero-variance groups of a model, and what i.i.d. rewards would give.

    Claims (Sign paper): the share always exceeds p^G + (1 - p)^G, by Jensen's inequality; at G = 4
    it is 0.69.
    """
    if min(options.groups) < 2 or options.samples < max(options.groups):
        raise BadInput("--groups must be at least 2 and at most --samples")
    counts = count_right(options)
    rates = counts / options.samples  # (problems,)
    p = float(rates.mean())
    rows = []
    for G in options.groups:
        shares = np.array([zero_variance_share(options.samples, int(c), G) for c in counts])
        predicted = p**G + (1 - p) ** G
        # The prediction is measured on the same problems: to first order a problem's part in the
        # difference is share - slope * rate.
        slope = G * (p ** (G - 1) - (1 - p) ** (G - 1))
        error = mean_and_error(shares - slope * rates)[1] if shares.any() else math.nan
        rows.append([G, *mean_and_error(shares), predicted, mean(shares) - predicted, error])

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    axes[0].hist(rates, bins=np.linspace(0, 1, min(options.samples, 16) + 1), edgecolor="white")
    axes[0].axvline(p, label=f"mean {p:.2f}", **DASHED)
    axes[0].set(xlabel="share of right responses", ylabel="problems", title="success by problem")
    sizes, _, _, _, gaps, errors = (np.array(column) for column in zip(*rows))
    axes[1].errorbar(sizes, gaps, 2 * errors, fmt="o", capsize=3)
    axes[1].axhline(0, label="i.i.d. prediction", **DASHED)
    axes[1].set(xlabel="group size G", title="zero-variance share − i.i.d. (± 2 standard errors)")
    use_powers_of_two(axes[1], options.groups)
    for axis in axes:
        axis.legend()
    caption = f"Shares of zero-variance groups, from {options.samples} responses per problem."
    header = ["G", "measured", "error", "i.i.d. prediction", "difference", "error"]
    return [(caption, header, rows)], figure


# --- rank ---
RANKS = ["stable", "entropy", "95 %"]


def effective_ranks(gram):
    """Three meanings of "effective rank" of a matrix with singular values s, from its Gram matrix.

    Stable: sum s^2 / max s^2. Entropy (Roy and Vetterli 2007): exp of the entropy of s / sum s.
    95 %: how many of the largest carry 95 % of sum s^2. Each is 1 for a matrix of rank 1.
    """
    energy = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0)  # s^2, the largest first
    needed = (energy.cumsum(0) < 0.95 * energy.sum() * (1 - 1e-12)).sum() + 1
    entropy = torch.special.entr(energy.sqrt() / energy.sqrt().sum()).sum()
    return (energy.sum() / energy[0]).item(), entropy.exp().item(), float(needed)


def group_ranks(model, batch, sizes, args):
    """{R: a list with six ranks per group of R responses, None for a zero-variance group}.

    The N responses to one problem are cut into N // R groups. The first three ranks are those of
    the R x parameters matrix of the responses' gradients, the others means over the weight
    matrices' gradients. With one advantage A_i per response, the gradient of response i is A_i u_i,
    so u_i, the gradient of its mean log-prob, is computed once for all R.
    """
    N = len(batch.mask)
    per_token = grpo.compute_weights(batch, args)  # (N, T)
    rows = [response_gradient(model, batch, i, per_token, args) for i in range(N)]
    u = [torch.stack(parts).double() for parts in zip(*rows)]  # (N, *shape of a weight) each
    gram = sum(x.flatten(1) @ x.flatten(1).T for x in u)  # (N, N)
    result = {R: [] for R in sizes}
    for R in sizes:
        for some in torch.arange(N // R * R, device=batch.mask.device).split(R):
            group = grpo.Batch(rewards=batch.rewards[:, some], mask=batch.mask[some])
            A = grpo.compute_advantages(group, args)[:, 0].double()  # (R,)
            summed = [torch.tensordot(A, x[some], 1) for x in u]
            matrices = [x if len(x) <= x.shape[1] else x.T for x in summed if x.dim() == 2]
            matrices = [x for x in matrices if x.any()]
            if not A.any() or not matrices:
                result[R].append(None)
                continue
            responses = effective_ranks(A[:, None] * gram[some][:, some] * A)
            by_weight = [effective_ranks(x @ x.T) for x in matrices]
            result[R].append([*responses, *np.mean(by_weight, 0)])
    return result


def measure_rank(options):
    """The effective rank of GRPO's gradient by group size, under six definitions.

    Claim (foundations paper): the gradient matrix has effective rank of about 2 for R in {2, 4, 8}.
    It does not say which matrix, nor which rank.
    """
    if min(options.groups) < 2 or options.samples < max(options.groups):
        raise BadInput("--groups must be at least 2, and --samples at least the largest of them")
    model, tokenizer, problems, args = set_up(options)
    found = {R: [] for R in options.groups}
    for batch in draw_groups(model, tokenizer, problems, options.samples, args):
        for R, ranks in group_ranks(model, batch, options.groups, args).items():
            found[R] += ranks
    kept = {R: [x for x in ranks if x] for R, ranks in found.items()}
    means = {R: np.mean(ranks, 0) for R, ranks in kept.items() if ranks}
    if not means:
        raise BadInput("all groups have zero variance, so GRPO has no gradient: try others")

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    titles = ["responses: R × parameters", "weights: mean over weight matrices"]
    for axis, title, first in zip(axes, titles, (0, 3)):
        for i, name in enumerate(RANKS):
            axis.plot(list(means), [row[first + i] for row in means.values()], "o-", label=name)
        axis.axhline(2, label="the paper: about 2", **DASHED)
        axis.set(xlabel="group size R", title=title)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        use_powers_of_two(axis, list(means))
    largest = list(means)
    axes[0].plot(largest, largest, color="grey", linestyle=":", label="R, the largest possible")
    axes[0].set_ylabel("effective rank")
    axes[0].legend()
    header = ["R", "groups", "zero-variance groups"]
    header += [f"{matrix}: {name}" for matrix in ("responses", "weights") for name in RANKS]
    rows = [[R, len(kept[R]), len(found[R]) - len(kept[R]), *map(float, means[R])] for R in means]
    return [("Means over the groups that have a gradient.", header, rows)], figure


# --- share ---
ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]


def fit_exponent(lengths, values, clusters):
    """(k, error) of values ~ lengths^k, (n,) each: least squares in logarithms.

    Responses to one problem, a cluster, are not independent, so the error is the sandwich estimate
    that sums their residuals first.
    """
    x = np.log(lengths) - np.log(lengths).mean()
    y = np.log(values) - np.log(values).mean()
    k = (x @ y) / (x @ x)
    residuals = x * (y - k * x)
    sums = [residuals[clusters == cluster].sum() for cluster in np.unique(clusters)]
    return float(k), float(np.linalg.norm(sums) / (x @ x))


def measure_share(options):
    """What short and long responses add to the gradient, from GRPO (alpha 0) to Dr. GRPO (alpha 1).

    Claim (length paper): a response adds in proportion to L^alpha, L its length.
    """
    model, tokenizer, problems, args = set_up(options, length_alpha)
    found = []  # per response with an advantage: problem, length, gradient's norm, weight by alpha
    groups = draw_groups(model, tokenizer, problems, options.samples, args)
    for number, batch in enumerate(groups):
        A = length_alpha.compute_advantages(batch, args)  # (N, T)
        settings = [dataclasses.replace(args, alpha=alpha) for alpha in ALPHAS]
        W = [length_alpha.compute_weights(batch, one) for one in settings]
        per_token = batch.mask / batch.mask.sum(1, keepdim=True)  # (N, T)
        for i in A[:, 0].nonzero()[:, 0].tolist():
            parts = response_gradient(model, batch, i, per_token, args)
            norm = math.sqrt(sum(part.double().square().sum().item() for part in parts))
            weights = [(w * A.abs())[i].sum().item() for w in W]
            found.append([number, batch.mask[i].sum().item(), norm, *weights])
    if len({length for _, length, *_ in found}) < 3:
        raise BadInput(f"{len(found)} responses have an advantage, few lengths: raise --problems")
    clusters, lengths, norms, *weights = np.array(found).T
    # W and A are equal along a response, so the norm of its part of the gradient is a product.
    shares = [weight * norms / (weight * norms).mean() for weight in weights]  # 1: an equal share
    short = lengths <= np.quantile(lengths, 0.25)
    long = lengths >= np.quantile(lengths, 0.75)
    rows = []
    for alpha, weight, share in zip(ALPHAS, weights, shares):
        fits = fit_exponent(lengths, weight, clusters) + fit_exponent(lengths, share, clusters)
        rows.append([alpha, *fits, mean(share[short]), mean(share[long])])
    caption = "Fits of share ~ L^k, with standard errors; mean shares, where 1 is an equal one."
    header = ["alpha", "k of the weight", "error", "k of the gradient", "error"]
    header += ["share of the shortest quarter", "share of the longest quarter"]
    return [(caption, header, rows)], plot_shares(lengths, shares, rows)


def plot_shares(lengths, shares, rows):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 7)))[1:-1]
    bins = np.digitize(lengths, edges)
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(ALPHAS)))
    for alpha, share, shade in zip(ALPHAS, shares, shades):
        x = [lengths[bins == b].mean() for b in np.unique(bins)]
        y = [share[bins == b].mean() for b in np.unique(bins)]
        axes[0].plot(x, y, "o-", color=shade, label=f"α = {alpha:g}")
    axes[0].axhline(1, **DASHED)
    axes[0].set(xlabel="response length, tokens", title="share of the gradient (1: equal)")
    _, k_weight, error_weight, k_gradient, error_gradient, _, _ = np.array(rows).T
    for k, error, marker, label in (
        (k_weight, error_weight, "s", "weight, Σ W |A|"),
        (k_gradient, error_gradient, "o", "gradient, ‖Σ W A ∇ log π‖"),
    ):
        axes[1].errorbar(ALPHAS, k, 2 * error, fmt=marker, capsize=3, label=label)
    axes[1].plot(ALPHAS, ALPHAS, label="the paper: k = α", **DASHED)
    axes[1].set(xlabel="α  (0: GRPO, 1: Dr. GRPO)", title="share ∝ L$^k$: k ± 2 standard errors")
    for axis in axes:
        axis.legend()
    return figure


# --- tokens ---
def what_ep_grpo_sees(batch, args):
    """{name: (N, T)}: what EP-GRPO computes for every token of a group."""
    # The gate does not depend on rewards: with unequal ones it multiplies grpo's advantage.
    unequal = torch.arange(len(batch.mask), device=batch.mask.device)[None] % 2.0
    unequal = dataclasses.replace(batch, rewards=unequal)
    gated = ep_grpo.compute_advantages(unequal, dataclasses.replace(args, progress_weight=0.0))
    ungated = grpo.compute_advantages(unequal, args)
    # Progress is step (3) of ep_grpo.compute_advantages, which has no function of its own.
    running = torch.where(batch.mask, batch.entropies, 0.0).double().cumsum(1)
    progress = torch.where(running[:, -1:] > 0, running / running[:, -1:], 0.0)
    return {
        "entropy": batch.entropies,
        "gate": gated / torch.where(batch.mask, ungated, 1.0),
        "log-ratio": batch.old_logps - batch.ref_logps,
        "bucket": (args.buckets * progress).floor().clamp(max=args.buckets - 1),
        "advantage": ep_grpo.compute_advantages(batch, args),
    }


def show_tokens(options):
    """The longest response of a group, its tokens coloured by what EP-GRPO computes for them.

    Claims (EP-GRPO paper): tokens are informative to very different degrees; a zero-variance group
    need not be silent.
    """
    model, tokenizer, problems, args = set_up(options, ep_grpo)
    path, config = find_model(options.model)
    origin = locate(config.get("model") or path)
    reference, _ = load_model(origin, args.device, trainable=False)
    groups = zip(problems, draw_groups(model, tokenizer, problems, options.samples, args))
    for problem, batch in groups:
        if len(batch.rewards.unique()) > 1:  # the first group whose rewards differ, else the last
            break
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    batch.ref_logps, _ = grpo.score(reference, batch, args)
    seen = what_ep_grpo_sees(batch, args)
    lengths = batch.mask.sum(1)
    row = int(lengths.argmax())
    L = int(lengths[row])
    ids = batch.input_ids[row, -batch.mask.shape[1] :][:L].tolist()
    columns = {name: values[row, :L].cpu().numpy() for name, values in seen.items()}
    rewards = [f"{reward:g}" for reward in batch.rewards[0].tolist()]
    title = f"{problem['question']}   reward {rewards[row]}, its group: {' '.join(rewards)}"
    figure = plot_tokens(columns, [tokenizer.decode([i]) for i in ids], title, args.buckets)

    rows = []
    for name, values in seen.items():
        kept = values[batch.mask]
        rows.append([name, float(kept.min()), float(kept.mean()), float(kept.max())])
    entropies = seen["entropy"][batch.mask].sort(descending=True).values
    share = entropies[: max(1, len(entropies) // 5)].sum() / entropies.sum().clamp(min=1e-9)
    outcome = grpo.compute_advantages(batch, args)[batch.mask]
    turned = (outcome * seen["advantage"][batch.mask] < 0).double().mean()
    facts = [
        ["entropy carried by the most uncertain fifth of the tokens", float(share)],
        ["tokens whose sign the progress term turns", float(turned)],
    ]
    header = ["quantity", "smallest", "mean", "largest"]
    return [("Over all tokens of the group:", header, rows), ("", ["share", ""], facts)], figure


def plot_tokens(columns, texts, title, buckets):
    """Up to 64 tokens in lines of 16, and under each its values."""
    wide = 16
    shown = min(len(texts), 64)
    height = len(columns) + 1.7
    lines = math.ceil(shown / wide)
    figure, axis = plt.subplots(figsize=(9, 0.4 + 0.28 * height * lines))
    shades = {}  # brown to violet around 0 if some are negative, else white to blue
    for name, values in columns.items():
        top = {"gate": 1, "bucket": buckets}.get(name) or max(1e-9, np.abs(values).max())
        if min(values) < 0:
            shades[name] = plt.get_cmap("PuOr")(0.5 + 0.4 * values / top)[:, :3]
        else:
            shades[name] = plt.get_cmap("Blues")(0.6 * values / top)[:, :3]
    for t, text in enumerate(texts[:shown]):
        x = t % wide
        y = -height * (t // wide)
        text = text if text.isprintable() and text.strip() else repr(text)[1:-1]
        text = text if len(text) < 9 else text[:7] + "…"
        style = {"ha": "center", "va": "center", "parse_math": False}
        size = 10 if len(text) < 6 else 7
        axis.text(x + 0.5, y + 1.4, text, weight="bold", size=size, **style)
        for i, (name, values) in enumerate(columns.items()):
            shade = shades[name][t]
            axis.add_patch(plt.Rectangle((x, y - i), 0.96, 0.92, color=shade, linewidth=0))
            number = f"{float(values[t]):z.{0 if name == 'bucket' else 2}f}"
            axis.text(x + 0.5, y - i + 0.42, number, fontsize=8, color=readable_ink(shade), **style)
            if x == 0:
                axis.text(-0.15, y - i + 0.42, name, ha="right", va="center")
    axis.set(xlim=(-1.6, min(shown, wide)), ylim=(1.7 - height * lines, 2))
    if shown < len(texts):
        title = f"{title[:80]}, first {shown} of {len(texts)} tokens"
    axis.set_title(title[:110], parse_math=False)
    axis.axis("off")
    return figure


# --- passk ---
def measure_pass_at_k(options):
    """pass@k of several models on the same problems; the first model is the base.

    Claims: training makes search cheaper (small k) rather than reach wider (Sign paper); EP-GRPO's
    lead grows with k on hard problems (EP-GRPO paper).
    """
    if len(set(options.model)) < 2:
        raise BadInput("--model takes two models or more, the base first")
    n = options.samples
    ks = [2**i for i in range(n.bit_length())]  # 1, 2, 4, ... up to n
    runs = [find_model(name)[1] for name in options.model]
    run = next(filter(None, runs), None)  # all models get the problems of the first run
    counts = {name: count_right(options, name, run) for name in options.model}
    passes = {
        name: np.array([[grpo.pass_at_k(n, int(c), k) for k in ks] for c in right])
        for name, right in counts.items()
    }  # (problems, ks) each
    base = options.model[0]
    never = counts[base] == 0
    rows = []
    differences = []
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    for name, values in passes.items():
        middle, error = np.array([mean_and_error(column) for column in values.T]).T
        line = axis.plot(ks, middle, "o-", label=name[-60:])[0]
        high = np.minimum(middle + 2 * error, 1)
        axis.fill_between(ks, middle - 2 * error, high, color=line.get_color(), alpha=0.15)
        solved = counts[name] > 0
        rows.append([name, *map(float, middle), int((~solved).sum())])
        if name != base:
            first, last = (mean_and_error((values - passes[base])[:, i]) for i in (0, -1))
            won = f"{(never & solved).sum()} of {never.sum()}"
            lost = f"{(~never & ~solved).sum()} of {(~never).sum()}"
            differences.append([name, *first, *last, won, lost])
    use_powers_of_two(axis, ks)
    axis.set(xlabel="k, responses per problem", ylabel="pass@k (bands: ± 2 standard errors)")
    axis.legend()
    header = ["model", *(f"pass@{k}" for k in ks), "problems never solved"]
    tables = [(f"{len(never)} problems, {n} responses each.", header, rows)]
    header = [f"minus {base}", "at k = 1", "error", f"at k = {ks[-1]}", "error"]
    header += ["solved that the base never solves", "never solved that the base solves"]
    return tables + [("Paired differences:", header, differences)], figure


# --- the command line ---
def print_table(caption, header, rows):
    """A Markdown table: three digits per float, a dash for None and NaN."""
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


def save(write, path):
    """Call write(path), its folder made; returns the path."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write --output {path}: {error}") from error
    return path


def parse_options(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, function):
        text = function.__doc__
        command = commands.add_parser(name, help=text.split("\n")[0], description=text)
        command.set_defaults(function=function)
        command.add_argument("--output", help="the file to write (default: in runs/)")
        return command

    for name, function in ("curves", draw_curves), ("lengths", draw_lengths), ("map", draw_map):
        command = add(name, function)
        command.add_argument("runs", nargs="+", help="run folders, or packed .jsonl files")
        command.add_argument("--only", nargs="+", help="patterns of run names, such as '*_G8_*'")
        if name == "curves":
            command.add_argument("--keys", default=",".join(PANELS), help="numbers to draw")
            command.add_argument("--against", default="grpo", help="script to compare with (grpo)")
    diff = add("diff", write_page)
    diff.add_argument("scripts", nargs="*", help="compare the first with each other (default: all)")
    for name, function, problems, samples in (
        ("degeneracy", measure_degeneracy, 200, 32),
        ("rank", measure_rank, 48, 16),
        ("share", measure_share, 100, 8),
        ("tokens", show_tokens, 100, 8),
        ("passk", measure_pass_at_k, 100, 32),
    ):
        command = add(name, function)
        several = {"nargs": "+", "required": True} if name == "passk" else {}
        which = "hub name, folder or run (passk: several, the base first)"
        command.add_argument("--model", **several, help=which)
        count = f"number of problems ({problems})"
        command.add_argument("--problems", type=int, default=problems, help=count)
        count = f"responses to each problem ({samples})"
        command.add_argument("--samples", type=int, default=samples, help=count)
        if name in ("degeneracy", "rank"):
            sizes = {"nargs": "+", "default": [2, 4, 8, 16]}
            command.add_argument("--groups", type=int, **sizes, help="group sizes (2 4 8 16)")
    options, options.flags = parser.parse_known_args(argv)
    if options.flags and "samples" not in options:
        parser.error(f"unrecognized arguments: {' '.join(options.flags)}")
    return options


def main(argv=None):
    options = parse_options(argv)
    if options.command == "diff":
        print(f"Page: {write_page(options)}")
        return
    tables, figure = options.function(options)
    for table in tables:
        print_table(*table)
    path = Path(options.output or f"runs/{options.command}")
    path = save(figure.savefig, path if path.suffix else Path(f"{path}.png"))
    plt.close(figure)
    claim = options.function.__doc__.partition("\n\n")[2]
    print(f"From the papers. {' '.join(claim.split())}\nPicture: {path}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Glyph")  # a token that matplotlib's font lacks
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace")  # where the console cannot show a character
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
