"""The papers' claims, measured and drawn: each subcommand prints a table, draws one picture, and says what it found.

    python analysis.py curves runs/*                                    training curves, mean and spread over seeds
    python analysis.py degeneracy --model runs/grpo --runs runs/grpo    groups without variance, against an i.i.d. guess
    python analysis.py rank                                             the effective rank of GRPO's gradient
    python analysis.py length                                           what long and short responses contribute
    python analysis.py tokens --model runs/ep_grpo                      what EP-GRPO sees in one response
    python analysis.py passk --model tests/tiny runs/grpo               search compression, or more reach?

A model is a hub name, a folder, or a run: then it is the run's newest checkpoint, with the problems and flags of the
run. Without --model it is the tiny model in tests/tiny. The sentences after "Found" are computed from the numbers: on
your model and problems they may say the opposite. Standard errors are over problems, in `curves` over seeds.
"""

import argparse
import dataclasses
import html
import json
import math
import sys
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

import ep_grpo
import grpo
import length_alpha
from common import BadInput, checkpoints, load_model, token_logps_and_entropies, verify

# Okabe and Ito's colours: told apart with any kind of colour vision. One for each algorithm, in every picture.
COLOURS = {"grpo": "#0072B2", "dr_grpo": "#D55E00", "sign_grpo": "#009E73", "length_alpha": "#CC79A7", "ep_grpo": "#E69F00"}
LIST = list(COLOURS.values())
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                     "grid.alpha": 0.25, "figure.dpi": 150, "legend.frameon": False, "axes.axisbelow": True})


# --- what the subcommands share ---
def table(header, rows):
    """Print a Markdown table; floats get three digits."""
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in [header, *rows]]
    for i, row in enumerate(cells):
        print("| " + " | ".join(row) + " |" + ("\n|" + "---|" * len(header) if i == 0 else ""))


def finish(figure, out, claim, found):
    """Save the picture, then print which claim it tests and what the numbers say."""
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write the picture --out {out}: {error}") from error
    plt.close(figure)
    print(f"\nClaim: {claim}\nFound: {found}\nPicture: {out}")


def mean_se(values):
    """Mean and its standard error; the error of a single value is NaN."""
    values = np.asarray(values, dtype=float)
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def clear(value, error):
    """1 or -1 if a difference lies more than two standard errors above or below 0, else 0 (also if the error is NaN)."""
    return int(value > 2 * error) - int(value < -2 * error)


def find_model(name):
    """(what load_model takes, the flags of its run or {}): a run's folder stands for its newest checkpoint."""
    folder = Path(name or grpo.TINY_DIR)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    if not (run / "metrics.jsonl").exists():
        return str(folder) if folder.exists() else name, {}
    if run == folder and not checkpoints(run):
        raise BadInput(f"the run in {run} has no checkpoint yet: let it save one, or give another --model")
    return str(folder if run != folder else checkpoints(run)[-1]), read_json(run / "config.json")


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def set_up(options, script=grpo, name=None, shared=None):
    """(model, tokenizer, problems, args): args are the script's own, with the flags of a run (the model's, or `shared`),
    with ours."""
    path, run = find_model(name or options.model)
    run = shared or run
    args = script.parse_args([] if Path(path).resolve() == Path(grpo.TINY_DIR) else ["--model", path])
    known = {field.name for field in dataclasses.fields(args)}
    given = {key: value for key, value in vars(options).items() if key in known and value is not None}
    args = dataclasses.replace(args, **{key: value for key, value in run.items() if key in known} | given)
    args.model, args.device = path, options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(path, args.device)
    source = options.dataset or args.eval_dataset or args.dataset
    problems = grpo.load_problems(source, args.dataset_config, options.split, tokenizer, args)[: options.problems]
    if not problems:
        raise BadInput(f"{source} has no usable problems: another --dataset, or a larger --max_prompt_tokens")
    return model, tokenizer, problems, args


def draw(model, tokenizer, problems, samples, args):
    """Sample responses; yield one grpo.Batch a problem, P = 1 and G = `samples`, with no column that only others use."""
    draws, chunk = grpo.random_stream(args.seed, "evaluation", 0), max(1, 128 // samples)
    for start in tqdm(range(0, len(problems), chunk), desc="sampling", leave=False):
        some = problems[start : start + chunk]
        out = grpo.rollout(model, tokenizer, [problem["prompt_ids"] for problem in some], samples, args, draws)
        for i, problem in enumerate(some):
            ids, attention_mask, mask, _, texts = (x[i * samples : (i + 1) * samples] for x in out)
            rewards = torch.tensor([[verify(text, problem["answer"]) for text in texts]], device=model.device)
            unused = mask.shape[1] - int(mask.sum(1).max())
            columns, tokens = slice(ids.shape[1] - unused), slice(mask.shape[1] - unused)
            yield grpo.Batch(rewards, mask[:, tokens], ids[:, columns], attention_mask[:, columns])


def successes(options, name=None, shared=None):
    """How many of --samples responses to each problem are right, (problems,) int, and the problems."""
    model, tokenizer, problems, args = set_up(options, name=name, shared=shared)
    counts = [int(batch.rewards.sum()) for batch in draw(model, tokenizer, problems, options.samples, args)]
    return np.array(counts), problems


def response_gradient(model, batch, row, coefficients, weights, args):
    """Gradient of sum_t coefficients[row, t] log pi(token t of the row) in each of `weights`, a list of tensors."""
    used, length = batch.attention_mask[row].bool(), int(batch.mask[row].sum())
    ids = batch.input_ids[row][used][None]  # (1, S + L) without padding
    logps, _ = token_logps_and_entropies(model, ids, torch.ones_like(ids), length, args.temperature)  # (1, L)
    return torch.autograd.grad((coefficients[row, :length] * logps[0]).sum(), weights)


# --- curves ---
# What may differ between the seeds of one curve. Runs that differ in any other flag are never averaged.
FREE = {"seed", "output_dir", "resume", "device", "eval_every", "log_completions_every", "save_every",
        "micro_batch_tokens", "gradient_checkpointing"}  # fmt: skip
SHORT = {"group_size": "G", "alpha": "α", "progress_weight": "λ", "learning_rate": "lr"}


def read_run(folder):
    """{"folder", "config", "train": [...], "eval": [...]}, the lines of metrics.jsonl sorted by kind."""
    folder = Path(folder)
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} holds no readable run: {error}") from error
    run = {"folder": str(folder), "config": read_json(folder / "config.json")}
    run |= {"train": [x for x in lines if "reward" in x], "eval": [x for x in lines if "eval_accuracy" in x]}
    if not run["train"]:
        raise BadInput(f"the run in {folder} has no training step yet")
    return run


def group_runs(runs):
    """{label: [runs that differ by their seed only]}; a label names the script and whatever flags differ among all."""
    keys = sorted({key for run in runs for key in run["config"]} - FREE - {"script"})
    values = {key: {json.dumps(run["config"][key]) for run in runs if key in run["config"]} for key in keys}
    groups = {}
    for run in runs:
        config, label = run["config"], run["config"]["script"]
        for key in keys:
            if key in config and len(values[key]) > 1 and config[key] is not True:
                value = Path(config[key]).name[:24] if isinstance(config[key], str) else config[key]
                label += f" no {key}" if value is False else f" {SHORT.get(key, key)}={value}"
        seeds = groups.setdefault(label, [])
        if same := [other["folder"] for other in seeds if other["config"].get("seed") == config.get("seed")]:
            raise BadInput(f"{same[0]} and {run['folder']} have the same flags and seed: give one of them")
        seeds.append(run)
    return dict(sorted(groups.items()))


def colours(labels):
    """{label: colour}: the algorithm's own, paler for each further variant of it."""
    result = {}
    for label in labels:
        base = np.array(matplotlib.colors.to_rgb(COLOURS.get(label.split()[0], "#555555")))
        same = [other for other in labels if other.split()[0] == label.split()[0]]
        pale = 0.65 * same.index(label) / max(1, len(same) - 1)
        result[label] = tuple(base * (1 - pale) + pale)
    return result


def series(runs, kind, key, window=1):
    """(steps, mean, sd) over seeds of running means over `window` lines; steps that all seeds have, sd 0 for one seed."""
    curves = []
    for run in runs:
        lines = [(line["step"], line[key]) for line in run[kind] if line.get(key) is not None]
        values = [y for _, y in lines]
        means = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
        curves.append(dict(zip([step for step, _ in lines], means)))
    steps = sorted(set.intersection(*map(set, curves)))
    ys = np.array([[curve[step] for step in steps] for curve in curves])  # (seeds, steps)
    return steps, ys.mean(0), ys.std(0, ddof=1) if len(runs) > 1 else 0 * ys[0]


def plot_series(axis, runs, kind, key, window, colour, **style):
    steps, mean, sd = series(runs, kind, key, window)
    axis.plot(steps, mean, color=colour, **style)
    axis.fill_between(steps, mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)


def curves(options):
    """Training curves of runs, the seeds of an algorithm as mean and standard deviation."""
    groups, window = group_runs([read_run(folder) for folder in options.runs]), options.smooth
    colour, rows, final = colours(list(groups)), [], {}
    figure, axes = plt.subplots(2, 3, figsize=(9, 5.2), layout="constrained")
    panels = [("train", "reward", "reward"), ("eval", "eval_accuracy", "held-out accuracy"),
              ("train", "completion_len", "response length, tokens"), ("train", "entropy", "entropy, nats"),
              ("train", "degenerate_frac", "groups without variance"), ("train", "grad_norm", "gradient norm")]  # fmt: skip
    for label, runs in groups.items():
        for axis, (kind, key, title) in zip(axes.flat, panels):
            plot_series(axis, runs, kind, key, window if kind == "train" else 1, colour[label], linewidth=1.6)
            axis.set_title(title, fontsize=10)
        plot_series(axes[1, 1], runs, "train", "degenerate_iid", window, colour[label], linewidth=1, linestyle="--")
        axes[0, 0].plot([], [], color=colour[label], label=f"{label} ({len(runs)})")
        ends = [[run["eval"][i]["eval_accuracy"] for run in runs if run["eval"]] for i in (0, -1)]
        final[label] = ends[1]
        means = [np.mean([line[key] for run in runs for line in run["train"]])
                 for key in ("completion_len", "degenerate_frac", "degenerate_iid")]  # fmt: skip
        spread = [f"{np.mean(x):.3f} ± {np.std(x, ddof=1) if len(x) > 1 else math.nan:.3f}" if x else "none" for x in ends]
        rows.append([label, len(runs), len(runs[0]["train"]), *spread, *map(float, means)])
    axes[1, 1].plot([], [], color="#555555", linewidth=1, linestyle="--", label="i.i.d. prediction")
    axes[1, 1].legend(fontsize=8)
    axes[1, 2].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", fontsize=8,
                  ncols=min(5, len(groups)), title=f"line: mean of seeds (their number), running mean of {window} steps; band: sd",
                  title_fontsize=8)  # fmt: skip
    table(["runs", "seeds", "steps", "first accuracy ± sd", "final accuracy ± sd", "length", "degenerate", "i.i.d."], rows)
    found = []
    for better, worse in (("sign_grpo", "grpo"), ("sign_grpo", "dr_grpo"), ("ep_grpo", "grpo")):
        for label in (label for label in final if label.split()[0] == better):
            other = label.replace(better, worse, 1)
            if not (final[label] and final.get(other)):
                continue
            (a, a_se), (b, b_se) = mean_se(final[label]), mean_se(final[other])
            error = math.hypot(a_se, b_se)
            word = ["within two standard errors", "clearly above", "clearly below"][clear(a - b, error)]
            word = "with one seed a side, no verdict" if math.isnan(error) else word
            found.append(f"{label} ends at {a:.3f}, {other} at {b:.3f}: {100 * (a - b):+.1f} ± {100 * error:.1f} points, {word}")
    gaps = {row[0]: row[-2] - row[-1] for row in rows}
    below = [label for label, gap in gaps.items() if gap < 0]
    found.append(f"the share of groups without variance is on average {np.mean(list(gaps.values())):+.3f} from its "
                 f"i.i.d. prediction, below it in {', '.join(below) or 'none'}")
    finish(figure, options.out, "Sign paper: at G = 4 sign beats the group mean by 45.4 points (9B model, GSM8K, 7 seeds);"
           " EP-GRPO paper: above GRPO by 4.8 points (3B); degeneracy exceeds its i.i.d. prediction (Jensen).",
           "; ".join(found) + ".")  # fmt: skip


# --- degeneracy ---
def degenerate_share(n, c, group):
    """Unbiased chance that `group` of n responses, c of them right, are all right or all wrong, drawn without return."""
    return (math.comb(c, group) + math.comb(n - c, group)) / math.comb(n, group)


def degeneracy(options):
    """Groups without variance: measured, and what a single success rate for all problems would predict."""
    if options.samples < max(options.groups) or min(options.groups) < 1:
        raise BadInput(f"--samples {options.samples} must be at least the largest of --groups, and those at least 1")
    runs = [read_run(folder) for folder in options.runs]
    counts, _ = successes(options)
    rates = counts / options.samples  # (problems,)
    p, rows, gaps = rates.mean(), [], {}
    for group in options.groups:
        shares = np.array([degenerate_share(options.samples, int(c), group) for c in counts])
        predicted = p**group + (1 - p) ** group
        # The prediction moves with the same problems: to first order, each one's part of the gap is share - slope * rate.
        slope = group * (p ** (group - 1) - (1 - p) ** (group - 1))
        gaps[group] = shares.mean() - predicted, mean_se(shares - slope * rates)[1]
        rows.append([group, *map(float, mean_se(shares)), float(predicted), *map(float, gaps[group])])
    table(["G", "measured", "± se", "i.i.d. prediction", "gap", "± se"], rows)

    figure, axes = plt.subplots(1, 3 if runs else 2, figsize=(9, 3.2), layout="constrained")
    axes[0].hist(rates, bins=np.linspace(0, 1, min(options.samples, 16) + 1), color=LIST[0], edgecolor="white")
    axes[0].axvline(p, color="black", linestyle="--", label=f"mean {p:.2f}")
    axes[0].set(xlabel=f"success rate in {options.samples} responses", ylabel="problems", title="problems differ in difficulty")
    x = range(len(rows))
    axes[1].errorbar(x, [row[1] for row in rows], [2 * row[2] for row in rows], fmt="o-", color=LIST[0], capsize=3,
                     label="measured ± 2 se")
    axes[1].plot(x, [row[3] for row in rows], "s--", color=LIST[1], label="i.i.d. prediction")
    axes[1].set_xticks(x, options.groups)
    axes[1].set(xlabel="group size G", ylim=(0, 1.02), title="groups without variance")
    found = [f"at {p:.2f} right on average, the measured share is " + ", ".join(
        f"{['equal to the prediction within two standard errors', 'above it', 'BELOW it'][clear(*gap)]} at G = {group} "
        f"({gap[0]:+.3f} ± {gap[1]:.3f})" for group, gap in gaps.items())]  # fmt: skip
    if 4 in gaps:
        found.append(f"at G = 4 it is {next(row[1] for row in rows if row[0] == 4):.2f}, in the paper 0.69")
    if runs:
        print()
        groups, moves = group_runs(runs), []
        for (label, some), colour in zip(groups.items(), colours(list(groups)).values()):
            plot_series(axes[2], some, "train", "degenerate_frac", options.smooth, colour, label=label)
            plot_series(axes[2], some, "train", "degenerate_iid", options.smooth, colour, linestyle="--", linewidth=1)
            parts = []
            for end in (slice(None, options.smooth), slice(-options.smooth, None)):
                lines = [line for run in some for line in run["train"][end]]
                parts += [float(np.mean([line[key] for line in lines])) for key in ("degenerate_frac", "degenerate_iid")]
            moves.append([label, *parts])
            found.append(f"{label}: the share went from {parts[0]:.2f} to {parts[2]:.2f} in training")
        table(["run", f"first {options.smooth} steps", "i.i.d.", f"last {options.smooth} steps", "i.i.d."], moves)
        axes[2].set(xlabel="step", ylim=(0, 1.02), title="in training (dashed: i.i.d.)")
    for axis in axes:
        axis.legend(fontsize=8)
    finish(figure, options.out, "Sign paper: the share of groups without variance always exceeds p^G + (1-p)^G (Jensen's "
           "inequality), 0.69 at G = 4; GRPO foundations paper: the gradient's sparsity grows in training.",
           "; ".join(found) + ".")  # fmt: skip


# --- rank ---
def singular_values(matrix):
    """Singular values of a (m, n) matrix in float64, from the Gram matrix of its shorter side."""
    matrix = matrix.double()
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()


def ranks(sigma):
    """Three meanings of "effective rank" for singular values (n,): stable, entropy, and singular values for 95 %.

    Stable rank: ||G||_F^2 / ||G||_2^2 = sum s^2 / max s^2. Entropy rank (Roy and Vetterli 2007): exp of the entropy of
    s / sum s. The last: how many of the largest carry 95 % of sum s^2. All are 1 for rank 1, and n for n equal values."""
    sigma = sigma.sort(descending=True).values
    energy, q = sigma.square(), sigma / sigma.sum()
    needed = int((energy.cumsum(0) < 0.95 * energy.sum() * (1 - 1e-12)).sum()) + 1
    return (energy.sum() / energy[0]).item(), torch.special.entr(q).sum().exp().item(), float(needed)


def group_ranks(model, batch, sizes, args, limit):
    """{R: [(3 ranks of the response matrix, 3 of the weight matrices), or None for a group without variance]}.

    The N responses of one problem are cut into N // R groups. Under GRPO the row of response i is A_i u_i, u_i the
    gradient of its mean log-prob (factors that all rows share change no rank): u_i is computed once for all sizes. The
    R x parameters matrix enters through its Gram matrix A_i A_j <u_i, u_j>, a sum over weights: at most `limit` numbers
    are held at once, at the price of another backward a response for each further chunk of weights."""
    N, groups = len(batch.mask), []
    for R in sizes:
        for rows in torch.arange(N, device=model.device)[: N // R * R].split(R):
            part = grpo.Batch(batch.rewards[:, rows], batch.mask[rows])
            groups.append((R, rows, grpo.compute_advantages(part, args)[:, 0].double()))  # A (R,), the same for all tokens
    alive = [group for group in groups if group[2].any()]
    gram = torch.zeros(N, N, dtype=torch.float64, device=model.device)
    by_weight = [[] for _ in alive]  # for each group, the ranks of each weight matrix' summed gradient
    chunks, size = [[]], 0
    for weight in model.parameters():
        if chunks[-1] and size + N * weight.numel() > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(weight)
        size += N * weight.numel()
    for chunk in chunks if alive else []:
        per_token = grpo.compute_weights(batch, args)  # (N, T)
        gradients = [response_gradient(model, batch, i, per_token, chunk, args) for i in range(N)]
        for weight in range(len(chunk)):
            u = torch.stack([gradient[weight] for gradient in gradients]).double()  # (N, *shape)
            gram += u.flatten(1) @ u.flatten(1).T
            if u.dim() == 3:  # a matrix, not a bias or a norm's scale
                for (_, rows, A), found in zip(alive, by_weight):
                    summed = torch.tensordot(A, u[rows], 1)
                    if summed.any():  # e.g. a weight that this response does not use
                        found.append(ranks(singular_values(summed)))
    result = {R: [] for R in sizes}
    for R, _, A in groups:
        if not A.any():
            result[R].append(None)
    for (R, rows, A), found in zip(alive, by_weight):
        eigenvalues = torch.linalg.eigvalsh(A[:, None] * gram[rows][:, rows] * A)
        result[R].append((*ranks(eigenvalues.clamp(min=0).sqrt()), *np.mean(found, 0)))
    return result


def rank(options):
    """The effective rank of GRPO's gradient by group size, under six definitions."""
    if min(options.groups) < 2 or options.samples < max(options.groups):
        raise BadInput(f"--groups must be at least 2, and --samples {options.samples} at least the largest of them")
    model, tokenizer, problems, args = set_up(options)
    results = {R: [] for R in options.groups}
    for batch in draw(model, tokenizer, problems, options.samples, args):
        for R, found in group_ranks(model, batch, options.groups, args, options.memory_gb * 2**30 / 8).items():
            results[R] += found
    names = [f"{matrix}, {kind}" for matrix in ("responses", "weights") for kind in ("stable", "entropy", "95 %")]
    rows, means = [], {}
    for R, found in results.items():
        kept = [x for x in found if x]
        if kept:
            means[R] = np.mean(kept, 0)
            rows.append([R, len(kept), len(found) - len(kept), *map(float, means[R])])
    if not means:
        raise BadInput("every group was all right or all wrong, so GRPO has no gradient: more --problems, or others")
    table(["R", "groups", "excluded (no variance)", *names], rows)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    titles = "responses: R × parameters, a row a response", "weights: summed gradient, mean over matrices"
    for axis, title, first in zip(axes, titles, (0, 3)):
        for i, (kind, marker) in enumerate(zip(("stable rank", "entropy rank", "95 % of the energy"), "os^")):
            axis.plot(list(means), [row[first + i] for row in means.values()], marker + "-", color=LIST[i], label=kind)
        axis.axhline(2, color="black", linestyle="--", linewidth=1, label="the paper: ≈ 2")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(list(means), list(means))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="group size R", title=title)
    axes[0].plot(list(means), list(means), color="grey", linestyle=":", label="R, the largest possible")
    axes[0].set_ylabel("effective rank")
    axes[0].legend(fontsize=8)
    tested = [R for R in (2, 4, 8) if R in means] or list(means)
    values = {name: [means[R][i] for R in tested] for i, name in enumerate(names)}
    holds = {name: max(abs(x - 2) for x in some) <= 0.5 for name, some in values.items()}
    listed = {yes: "; ".join(f"{name}: {', '.join(f'{x:.1f}' for x in values[name])}" for name in names if holds[name] == yes)
              for yes in (True, False)}  # fmt: skip
    finish(figure, options.out, "GRPO foundations paper: the gradient matrix has effective rank ≈ 2 for R in {2, 4, 8} "
           "(it does not say which matrix, nor which rank).",
           f"for R = {', '.join(map(str, tested))}, 2 ± 0.5 throughout under {sum(holds.values())} of 6 definitions "
           f"({listed[True] or 'none'}), not under the others ({listed[False] or 'none'}).")  # fmt: skip


# --- length ---
def fit_exponent(lengths, values, clusters):
    """(k, se) of values ~ lengths^k, least squares in logarithms, (n,) each; the error allows for related responses."""
    x, y = np.log(lengths), np.log(values)
    x, y, clusters = x - x.mean(), y - y.mean(), np.asarray(clusters)
    k = (x @ y) / (x @ x)
    scores = x * (y - k * x)
    parts = np.array([scores[clusters == cluster].sum() for cluster in np.unique(clusters)])
    return float(k), float(np.sqrt((parts**2).sum()) / (x @ x))


def length(options):
    """What a response contributes to the gradient, by its length, from GRPO (alpha 0) to Dr. GRPO (alpha 1)."""
    model, tokenizer, problems, args = set_up(options, length_alpha)
    alphas, weights = options.alphas, list(model.parameters())
    lengths, cluster, plain = [], [], []  # of each response with an advantage; plain = ||grad sum_t log pi||
    weight_part = {alpha: [] for alpha in alphas}  # sum_t W |A|
    gradient_part = {alpha: [] for alpha in alphas}  # || sum_t W A grad log pi ||
    for problem, batch in enumerate(draw(model, tokenizer, problems, options.samples, args)):
        advantages = length_alpha.compute_advantages(batch, args)  # (N, T)
        for i in advantages[:, 0].nonzero()[:, 0].tolist():
            gradient = response_gradient(model, batch, i, batch.mask.float(), weights, args)
            plain.append(math.sqrt(sum(g.double().square().sum().item() for g in gradient)))
            lengths.append(int(batch.mask[i].sum()))
            cluster.append(problem)
            for alpha in alphas:
                W = length_alpha.compute_weights(batch, dataclasses.replace(args, alpha=alpha))[i]  # (T,)
                weight_part[alpha].append((W * advantages[i].abs()).sum().item())
                # W and A are the same for all tokens of a response: they scale its gradient.
                gradient_part[alpha].append((W[0] * advantages[i, 0].abs()).item() * plain[-1])
    if len(set(lengths)) < 3:
        raise BadInput(f"{len(lengths)} responses with an advantage, {len(set(lengths))} lengths: more --problems or --samples")
    lengths = np.array(lengths)
    short, long = lengths <= np.quantile(lengths, 0.25), lengths >= np.quantile(lengths, 0.75)
    rows, fits, shares = [], {}, {}
    for alpha in alphas:
        shares[alpha] = np.array(gradient_part[alpha]) / sum(gradient_part[alpha]) * len(lengths)  # 1: an equal share
        fits[alpha] = fit_exponent(lengths, weight_part[alpha], cluster), fit_exponent(lengths, shares[alpha], cluster)
        rows.append([alpha, *(f"{k:.2f} ± {se:.2f}" for k, se in fits[alpha]),
                     float(shares[alpha][short].mean()), float(shares[alpha][long].mean())])  # fmt: skip
    table(["alpha", "weight ~ L^k: k ± se", "gradient ~ L^k: k ± se", "share of the shortest quarter", "of the longest"], rows)
    base, base_se = fit_exponent(lengths, plain, cluster)
    print(f"\n{len(lengths)} responses of {lengths.min()} to {lengths.max()} tokens with an advantage (1 is an equal share); "
          f"before any weight, ||grad log pi(response)|| ~ L^{base:.2f}: 1 if the tokens' gradients agree, 1/2 if unrelated")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(alphas)))
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 7)))
    bins = np.digitize(lengths, edges[1:-1])
    for alpha, shade in zip(alphas, shades):
        places = [lengths[bins == b].mean() for b in np.unique(bins)]
        axes[0].plot(places, [shares[alpha][bins == b].mean() for b in np.unique(bins)], "o-", color=shade, label=f"α = {alpha:g}")
    axes[0].axhline(1, color="black", linestyle="--", linewidth=1)
    axes[0].set(xlabel="response length L, tokens (means of bins)", ylabel="share of the gradient (1: equal)", xscale="log",
                yscale="log", title="a response's share by its length")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for i, (name, marker) in enumerate((("the weight, Σ W|Â|", "s"), ("the gradient, ‖Σ W Â ∇log π‖", "o"))):
        axes[1].errorbar(alphas, [fits[a][i][0] for a in alphas], [2 * fits[a][i][1] for a in alphas], fmt=marker,
                         capsize=3, color=LIST[1 - i], label=f"{name} ± 2 se")
    axes[1].plot(alphas, alphas, color="black", linestyle="--", linewidth=1, label="the paper: k = α")
    axes[1].set(xlabel="α  (0: GRPO, 1: Dr. GRPO)", ylabel="k", title="fitted exponent of share ~ L^k")
    for axis in axes:
        axis.legend(fontsize=8)
    found = []
    for alpha in alphas:
        (w, w_se), (k, se) = fits[alpha]
        verdict = [f"as claimed ({alpha:g})", f"above {alpha:g}", f"below {alpha:g}"]
        found.append(f"alpha {alpha:g}: weight L^{w:.2f}, {verdict[clear(w - alpha, w_se)]}, gradient L^{k:.2f}, "
                     f"{verdict[clear(k - alpha, se)]}")  # fmt: skip
    finish(figure, options.out, "length paper: a response contributes like L^alpha, independent of its length under GRPO "
           "(alpha 0, P2), in proportion to it under Dr. GRPO (alpha 1).", "; ".join(found) + ".")  # fmt: skip


# --- tokens ---
def buckets(batch, args):
    """(N, T) the bucket of progress of each token, -1 off the mask: step (3) of ep_grpo.compute_advantages."""
    running = torch.where(batch.mask, batch.entropies, 0.0).double().cumsum(1)
    progress = torch.where(running[:, -1:] > 0, running / running[:, -1:], 0.0)
    return torch.where(batch.mask, (args.buckets * progress).floor().clamp(max=args.buckets - 1), -1.0)


def what_ep_grpo_sees(batch, args):
    """{name: (N, T)} of the entropy, gate, log-ratio, bucket and final advantage of every token of a group."""
    # The gate does not depend on rewards: give it rewards that differ, then it is what multiplies grpo's advantage.
    unlike = dataclasses.replace(batch, rewards=torch.arange(len(batch.mask), device=batch.mask.device)[None] % 2.0)
    gated = ep_grpo.compute_advantages(unlike, dataclasses.replace(args, progress_weight=0.0))
    plain = grpo.compute_advantages(unlike, args)
    return {"entropy": batch.entropies, "gate": gated / torch.where(batch.mask, plain, 1.0),
            "log-ratio": batch.old_logps - batch.ref_logps, "bucket": buckets(batch, args),
            "advantage": ep_grpo.compute_advantages(batch, args)}  # fmt: skip


def token_colours(name, values, args):
    """(n, 3) background colours: diverging around 0 for signed values, sequential for the others, both pale."""
    if name in ("log-ratio", "advantage"):
        scale = plt.get_cmap("PuOr_r")(0.5 + 0.5 * np.asarray(values) / (np.abs(values).max() + 1e-9))
    else:
        top = {"gate": 1.0, "bucket": args.buckets - 1}.get(name, max(values) + 1e-9)
        scale = plt.get_cmap("YlGnBu")(0.75 * np.asarray(values) / max(top, 1e-9))
    return 0.2 + 0.8 * scale[:, :3]


def ink(colour):
    return "black" if colour @ [0.3, 0.59, 0.11] > 0.5 else "white"


def token_page(title, texts, columns, args):
    """A self-contained HTML page: the response once for each quantity, its values in the tooltips. All text escaped."""
    tips = [", ".join(f"{name} {column[t]:.3g}" for name, column in columns.items()) for t in range(len(texts))]
    parts = [f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>What EP-GRPO sees</title><style>body{{font:15px "
             f"sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}p.t{{font:15px/1.9 monospace}}span{{padding:2px;"
             f"border-radius:3px;white-space:pre-wrap}}</style><h1>What EP-GRPO sees</h1><p>{html.escape(title)}</p>"]
    for name, values in columns.items():
        parts.append(f"<h2>{name}, {min(values):.3g} to {max(values):.3g}</h2><p class=t>")
        for text, tip, colour in zip(texts, tips, token_colours(name, values, args)):
            style = f"background:{matplotlib.colors.to_hex(colour)};color:{ink(colour)}"
            shown = html.escape(text.replace("\n", "⏎\n"))
            parts.append(f'<span style="{style}" title="{html.escape(tip)}">{shown}</span>')
        parts.append("</p>")
    return "\n".join(parts[:1]) + "".join(parts[1:]) + "</html>\n"


def tokens(options):
    """One response, its tokens coloured by what EP-GRPO computes: an HTML page beside the picture."""
    model, tokenizer, problems, args = set_up(options, ep_grpo)
    name = options.reference or find_model(options.model)[1].get("model") or grpo.TINY_DIR
    reference, _ = load_model(find_model(name)[0], args.device, trainable=False)
    if reference.get_input_embeddings().num_embeddings != model.get_input_embeddings().num_embeddings:
        raise BadInput(f"{name} has another vocabulary than {args.model}: --reference names the model the run began with")
    chosen = None
    for problem, batch in zip(problems, draw(model, tokenizer, problems, options.samples, args)):
        if chosen is None or batch.rewards.unique().numel() > 1:  # the first with rewards that differ, else the very first
            chosen = problem, batch
        if batch.rewards.unique().numel() > 1:
            break
    problem, batch = chosen
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    batch.ref_logps, _ = grpo.score(reference, batch, args)
    seen, lengths = what_ep_grpo_sees(batch, args), batch.mask.sum(1)
    row = int(lengths.argmax()) if options.row is None else options.row
    if not 0 <= row < len(lengths):
        raise BadInput(f"--row {row}: the group has rows 0 to {len(lengths) - 1}")
    L = int(lengths[row])
    texts = [tokenizer.decode([token]) for token in batch.input_ids[row, -batch.mask.shape[1] :][:L].tolist()]
    columns = {name: values[row, :L].cpu().numpy() for name, values in seen.items()}
    rewards = batch.rewards[0].tolist()
    title = f"{problem['question']} (answer {problem['answer']}), reward {rewards[row]:.0f}, rewards of its group: {rewards}"
    mask, entropies = batch.mask, batch.entropies[batch.mask].sort(descending=True).values
    table(["quantity, all tokens of the group", "smallest", "mean", "largest"],
          [[name, *(float(f(x[mask])) for f in (torch.min, torch.mean, torch.max))] for name, x in seen.items()])

    show, wide = min(L, 72), 18  # tokens in the picture, and in a line of it; the page has all
    lines, height = -(-show // wide), len(columns) + 1.6
    figure, axis = plt.subplots(figsize=(9, 0.35 * height * lines + 0.4), layout="constrained")
    for i, (name, values) in enumerate(columns.items()):
        for t, colour in enumerate(token_colours(name, values, args)[:show]):
            x, y = t % wide, -height * (t // wide) - i
            axis.add_patch(plt.Rectangle((x, y), 0.96, 0.92, color=colour, linewidth=0))
            number = f"{values[t]:.0f}" if name == "bucket" else f"{values[t]:.2f}"
            axis.text(x + 0.48, y + 0.44, number, ha="center", va="center", fontsize=8, color=ink(colour))
            if i == 0:
                text = (texts[t] if texts[t].isprintable() and texts[t].strip() else repr(texts[t])[1:-1])[:9]
                axis.text(x + 0.48, y + 1.4, text, ha="center", va="center", fontsize=10, weight="bold", parse_math=False)
        for line in range(lines):
            axis.text(-0.2, -height * line - i + 0.44, name, ha="right", va="center")
    axis.set(xlim=(-2.2, min(show, wide)), ylim=(-height * lines + 1.6, 2))
    axis.set_title(title[:110] + (f", first {show} of {L} tokens" if show < L else ""), fontsize=9, parse_math=False)
    axis.axis("off")

    share = float(entropies[: max(1, len(entropies) // 5)].sum() / entropies.sum().clamp(min=1e-9))
    outcome, final = grpo.compute_advantages(batch, args)[mask], seen["advantage"][mask]
    found = f"the most uncertain fifth of the group's tokens carries {share:.0%} of the entropy; "
    if outcome.any():
        found += f"the progress term turns the sign of {float((outcome * final < 0).float().mean()):.1%} of the tokens"
    else:
        found += f"all rewards are equal: GRPO is silent, {float((final != 0).float().mean()):.0%} of the tokens keep a signal"
    if not (seen["log-ratio"][mask] != 0).any():
        found += "; model and reference agree everywhere, so there is no progress term: give a trained --model"
    page = Path(options.out).with_suffix(".html")
    finish(figure, options.out, "EP-GRPO paper: tokens are informative to very different degrees, GRPO gives all of a response "
           "the same sign, and groups of equal rewards need not be silent.", f"{found}. All tokens: {page}")  # fmt: skip
    page.write_text(token_page(title, texts, columns, args), encoding="utf-8")


# --- passk ---
def passk(options):
    """pass@k of several models on the same problems, the first one being the base."""
    n, counts = options.samples, {}
    ks = [2**i for i in range(n.bit_length())]  # 1, 2, 4, ... up to n
    if len(options.model) < 2:
        raise BadInput("--model takes two models or more, the base first")
    shared = next((run for run in map(find_model, options.model) if run[1]), None)
    for name in options.model:
        counts[name], problems = successes(options, name, shared and shared[1])
    passes = {name: np.array([[grpo.pass_at_k(n, int(c), k) for k in ks] for c in some]) for name, some in counts.items()}
    figure, axis = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for i, (name, some) in enumerate(passes.items()):
        error = 2 * some.std(0, ddof=1) / math.sqrt(len(some)) if len(some) > 1 else 0 * some[0]
        axis.plot(ks, some.mean(0), "os^Dv"[i % 5] + "-", color=LIST[i % 5], label=name[-60:])
        axis.fill_between(ks, some.mean(0) - error, some.mean(0) + error, color=LIST[i % 5], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, ks)
    axis.set(xlabel="k, responses a problem", ylabel="pass@k (band: ± 2 se)", title=f"{len(problems)} problems, {n} samples each")
    axis.legend(fontsize=8)
    table(["model", *(f"pass@{k}" for k in ks), "problems never solved"],
          [[name, *map(float, some.mean(0)), int((counts[name] == 0).sum())] for name, some in passes.items()])  # fmt: skip

    base, found = options.model[0], []
    for name in list(passes)[1:]:
        change = passes[name] - passes[base]  # (problems, ks), paired
        (first, first_se), (last, last_se) = mean_se(change[:, 0]), mean_se(change[:, -1])
        at_1, at_n = clear(first, first_se), clear(last, last_se)
        verdict = "no clear change at either end" if not at_1 and not at_n else "a loss" if min(at_1, at_n) < 0 else (
            "search compression: more at k = 1, nothing clear at the largest k" if not at_n else
            "mainly search compression, with some reach" if first > last else "more reach, at least as much as at k = 1")  # fmt: skip
        never = counts[base] == 0
        found.append(f"{name} against {base}: {100 * first:+.1f} ± {100 * first_se:.1f} points at k = 1, {100 * last:+.1f} ± "
                     f"{100 * last_se:.1f} at k = {ks[-1]}: {verdict}; of {never.sum()} problems that the base never solved it "
                     f"solved {(never & (counts[name] > 0)).sum()}, of {(~never).sum()} others it lost "
                     f"{(~never & (counts[name] == 0)).sum()}")  # fmt: skip
    ceiling = passes[base][:, -1].mean()
    if ceiling > 0.9:
        found.append(f"the base already has {ceiling:.2f} at k = {ks[-1]}: little room to see reach, take harder problems")
    finish(figure, options.out, "Sign paper: the gain is mainly search compression, at small k, rather than a larger "
           "capacity; EP-GRPO paper: its advantage grows with k on hard problems.", "; ".join(found) + ".")  # fmt: skip


# --- the command line ---
def parse_options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(function, problems=None, samples=None):
        sub = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("--out", default=f"docs/{function.__name__}.png", help="the picture (default: %(default)s)")
        if problems:
            sub.add_argument("--dataset", help="as in grpo.py, or a benchmark's name (default: held-out problems of the run)")
            sub.add_argument("--split", default="test", help="which part of it (default: %(default)s)")
            sub.add_argument("--problems", type=positive, default=problems, help="how many problems (default: %(default)s)")
            sub.add_argument("--samples", type=positive, default=samples, help="responses a problem (default: %(default)s)")
            sub.add_argument("--seed", type=int, default=0, help="of the samples")
            for flag, kind in (("dataset_config", str), ("instruction", str), ("temperature", float), ("device", str),
                               ("max_prompt_tokens", positive), ("max_new_tokens", positive)):  # fmt: skip
                sub.add_argument(f"--{flag}", type=kind, help="as in grpo.py (default: the run's)")
        return sub

    def add_groups(sub):
        sub.add_argument("--groups", type=positive, nargs="+", default=[2, 4, 8, 16], help="group sizes")

    sub = command(curves)
    sub.add_argument("runs", nargs="+", help="run folders; those that differ by the seed only become one curve")
    sub.add_argument("--smooth", type=positive, default=5, help="steps in a running mean (default: %(default)s)")
    sub = command(degeneracy, 200, 32)
    add_groups(sub)
    sub.add_argument("--runs", nargs="+", default=[], help="run folders: the share during training")
    sub.add_argument("--smooth", type=positive, default=5, help="steps in a running mean (default: %(default)s)")
    sub = command(rank, 48, 16)
    add_groups(sub)
    sub.add_argument("--memory_gb", type=float, default=2.0, help="gradients held at once; less takes longer")
    sub = command(length, 100, 8)
    sub.add_argument("--alphas", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1], help="0 GRPO, 1 Dr. GRPO")
    sub = command(tokens, 100, 8)
    sub.add_argument("--reference", help="the model before training (default: what the run began with)")
    sub.add_argument("--row", type=int, help="which response of the group (default: the longest)")
    command(passk, 100, 32).add_argument("--model", nargs="+", required=True, help="the base, then trained ones")
    for name in ("degeneracy", "rank", "length", "tokens"):
        commands.choices[name].add_argument("--model", help="hub name, folder or run (default: the tiny model)")
    return parser.parse_args(argv)


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Glyph")  # a token in a script that matplotlib's font lacks
    try:
        options = parse_options()
        options.function(options)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
