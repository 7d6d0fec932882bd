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
import itertools
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
BLUE, RED, GREEN, PINK, ORANGE = LIST = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SPARE = "#56B4E9", "#8C564B", "#000000", "#999933"  # for scripts of your own
COLOURS = {"grpo": BLUE, "dr_grpo": RED, "sign_grpo": GREEN, "length_alpha": PINK, "ep_grpo": ORANGE}
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                     "grid.alpha": 0.25, "figure.dpi": 150, "legend.frameon": False, "legend.fontsize": 8,
                     "axes.axisbelow": True, "axes.titlesize": 10, "figure.constrained_layout.use": True})  # fmt: skip


CLAIMS = {
    "curves": "Sign paper: sign beats the group mean by 45.4 points at G = 4 (9B model, GSM8K, 7 seeds), and groups "
    "lack variance more often than an i.i.d. guess says; EP-GRPO paper: 4.8 points above GRPO (3B model)",
    "degeneracy": "Sign paper: the share of groups without variance always exceeds p^G + (1-p)^G (Jensen's inequality) "
    "and is 0.69 at G = 4; foundations paper: the gradient's sparsity grows in training",
    "rank": "foundations paper: the gradient matrix has effective rank ≈ 2 whatever R in {2, 4, 8} (it does not say "
    "which matrix, nor which rank)",
    "length": "length paper: a response contributes like L^alpha: whatever its length under GRPO (alpha 0, P2), in "
    "proportion to it under Dr. GRPO (alpha 1)",
    "tokens": "EP-GRPO paper: tokens are informative to very different degrees, GRPO gives all tokens of a response "
    "one sign, and a group of equal rewards need not be silent",
    "passk": "Sign paper: the gain is mainly search compression, at small k, rather than capacity; EP-GRPO paper: its "
    "advantage grows with k on hard problems",
}


# --- what the subcommands share ---
def table(header, rows):
    """Print a Markdown table; floats get three digits."""
    for i, row in enumerate([header, *rows]):
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row) + " |")
        if i == 0:
            print("|" + "---|" * len(header))


def finish(figure, options, found):
    """Save the picture; print which claim it tests, and what the numbers say: a list of sentences."""
    out = Path(options.out) if Path(options.out).suffix else Path(f"{options.out}.png")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write the picture --out {out}: {error}") from error
    plt.close(figure)
    print(f"\nClaim: {CLAIMS[options.command]}.\nFound: {'; '.join(found)}.\nPicture: {out}")


def mean_se(values):
    """Mean and its standard error, floats; the error of a single value is NaN."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else math.nan


def clear(value, error):
    """1 or -1 if a difference lies over two standard errors above or below 0, else 0, also if the error is NaN."""
    return int(value > 2 * error) - int(value < -2 * error)


def find_model(name):
    """(what load_model takes, the flags of its run or {}): a run's folder stands for its newest checkpoint."""
    folder = Path(name or grpo.TINY_DIR)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    if not (run / "config.json").exists() or "script" not in (config := read_json(run / "config.json")):
        return name or grpo.TINY_DIR, {}  # not one of our runs
    if run == folder and not checkpoints(run):
        raise BadInput(f"the run in {run} has no checkpoint yet: let it save one, or give another --model")
    return str(checkpoints(run)[-1] if run == folder else folder), config


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def set_up(options, script=grpo, name=None, run=None):
    """(model, tokenizer, problems, args): the script's own args, with the flags of the run, then those given here."""
    path, own = find_model(name or options.model)
    tiny = Path(path).resolve() == Path(grpo.TINY_DIR).resolve()
    args = script.parse_args([] if tiny else ["--model", path])
    known = {field.name for field in dataclasses.fields(args)}
    flags = (run or own) | {key: value for key, value in vars(options).items() if value is not None}
    args = dataclasses.replace(args, **{key: value for key, value in flags.items() if key in known})
    args.model, args.device = path, options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not args.temperature >= 0.01:
        raise BadInput(f"--temperature must be at least 0.01, not {args.temperature}")
    model, tokenizer = load_model(path, args.device)
    source, config = options.dataset or args.eval_dataset or args.dataset, args.dataset_config
    if not options.dataset and args.eval_dataset:
        config = options.dataset_config  # as in the scripts: the run's belongs to what it was trained on
    elif not options.dataset and source.endswith(".jsonl"):
        raise BadInput(f"the run has no held-out problems, {source} is what it was trained on: give a --dataset")
    problems = grpo.load_problems(source, config, options.split, tokenizer, args)[: options.problems]
    if not problems:
        raise BadInput(f"{source} has no usable problems: another --dataset, or a larger --max_prompt_tokens")
    return model, tokenizer, problems, args


def at_least_two(options):
    if options.samples < 2:
        raise BadInput(f"--samples {options.samples} must be at least 2, or a group has no variance")


def draw(model, tokenizer, problems, samples, args):
    """Sample responses; yield one grpo.Batch a problem, P = 1 and G = `samples`, cut to its own longest response."""
    draws, chunk = grpo.random_stream(args.seed, "evaluation", 0), max(1, 128 // samples)
    for start in tqdm(range(0, len(problems), chunk), desc="sampling", leave=False):
        some = problems[start : start + chunk]
        out = grpo.rollout(model, tokenizer, [problem["prompt_ids"] for problem in some], samples, args, draws)
        for i, problem in enumerate(some):
            ids, attention_mask, mask, _, texts = (x[i * samples : (i + 1) * samples] for x in out)
            rewards = torch.tensor([[verify(text, problem["answer"]) for text in texts]], device=model.device)
            T = int(mask.sum(1).max())
            S = ids.shape[1] - mask.shape[1] + T
            yield grpo.Batch(rewards, mask[:, :T].contiguous(), ids[:, :S], attention_mask[:, :S])


def successes(options, name=None, run=None):
    """How many of --samples responses to each problem are right, (problems,) int."""
    model, tokenizer, problems, args = set_up(options, name=name, run=run)
    batches = draw(model, tokenizer, problems, options.samples, args)
    return np.array([int(batch.rewards.sum()) for batch in batches])


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
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]  # the last may be half written
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} holds no readable run: {error}") from error
    run = {"folder": str(folder), "config": read_json(folder / "config.json")}
    run |= {"train": [x for x in lines if "reward" in x], "eval": [x for x in lines if "eval_accuracy" in x]}
    for line in run["train"]:
        line["gap"] = line["degenerate_frac"] - line["degenerate_iid"]
    return run


def read_runs(folders):
    """The runs with a training step; others, such as an evaluation only, are named and left out."""
    runs = [read_run(folder) for folder in folders if not Path(folder).is_file()]  # runs/* holds pictures, too
    for run in runs:
        if not run["train"]:
            print(f"{run['folder']}: no training step yet, left out", file=sys.stderr)
    runs = [run for run in runs if run["train"]]
    if not runs:
        raise BadInput("there is no training step yet in any of the runs")
    return runs


def group_runs(runs):
    """{label: [runs that differ by their seed only]}; a label names the script and whatever flags differ among all."""
    keys = sorted({key for run in runs for key in run["config"]} - FREE - {"script"})
    values = {key: {json.dumps(run["config"][key]) for run in runs if key in run["config"]} for key in keys}
    short = {key: len({Path(json.loads(value) or "").name[:24] for value in values[key]}) == len(values[key])
             for key in keys if all(value[0] in '"n' for value in values[key])}  # texts (or null) whose ends differ
    groups = {}
    for run in sorted(runs, key=lambda run: [*COLOURS, run["config"]["script"]].index(run["config"]["script"])):
        config, label = run["config"], run["config"]["script"]
        for key in keys:
            if key in config and len(values[key]) > 1 and config[key] is not True:
                value = Path(config[key] or "").name[:24] if short.get(key) else config[key]
                label += f" no {key}" if value is False else f" {SHORT.get(key, key)}={value}"
        for other in groups.setdefault(label, []):
            numbers = [[(line["reward"], line["loss"]) for line in one["train"]] for one in (run, other)]
            if config["seed"] == other["config"]["seed"] or numbers[0] == numbers[1]:
                raise BadInput(f"{other['folder']} and {run['folder']} have the same seed or numbers: give one of them")
        groups[label].append(run)
    return groups


def colours(labels):
    """{label: colour}: the algorithm's own, paler for each further variant of it."""
    result, others = {}, [name for name in dict.fromkeys(label.split()[0] for label in labels) if name not in COLOURS]
    known = COLOURS | {name: SPARE[i % len(SPARE)] for i, name in enumerate(others)}
    for label in labels:
        base = np.array(matplotlib.colors.to_rgb(known[label.split()[0]]))
        same = [other for other in labels if other.split()[0] == label.split()[0]]
        pale = 0.6 * same.index(label) / max(1, len(same) - 1)
        result[label] = tuple(base * (1 - pale) + pale)
    return result


def plot_seeds(axis, runs, kind, key, window, **style):
    """Draw mean and sd (a band) over seeds of running means over `window` lines, at the steps that all seeds have."""
    curves = []
    for run in runs:
        lines = [line for line in run[kind] if line.get(key) is not None]
        values = np.array([line[key] for line in lines])
        curves.append({line["step"]: values[max(0, i + 1 - window) : i + 1].mean() for i, line in enumerate(lines)})
    steps = sorted(set.intersection(*map(set, curves)))
    y = np.array([[curve[step] for step in steps] for curve in curves])  # (seeds, steps)
    axis.plot(steps, y.mean(0), **style)
    if len(runs) > 1 and steps:
        low, high = y.mean(0) - y.std(0, ddof=1), y.mean(0) + y.std(0, ddof=1)
        if key == "grad_norm":  # its axis has no 0
            low = np.maximum(low, y.min(0))
        axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)


def permutation_p(a, b):
    """Exact two-sided p-value of a difference of means: the share of all ways to deal the values that part as far."""
    values, total = [*a, *b], sum(a) + sum(b)
    far = [abs(sum(some) / len(a) - (total - sum(some)) / len(b)) for some in itertools.combinations(values, len(a))]
    return float(np.mean(np.array(far) >= abs(np.mean(a) - np.mean(b)) - 1e-12))


def curves(options):
    """Training curves of runs, the seeds of an algorithm as mean and standard deviation."""
    runs = read_runs(options.runs)
    groups, rows, final = group_runs(runs), [], {}
    # Accuracies are compared at a step where every run that is evaluated at all has one.
    common = set.intersection(*({line["step"] for line in run["eval"]} for run in runs if run["eval"]) or [set()])
    ends = sorted({min(common), max(common)}) if common else []
    figure, axes = plt.subplots(2, 3, figsize=(9, 5.2))
    panels = {
        "reward": "reward", "eval_accuracy": "held-out accuracy", "completion_len": "response length, tokens",
        "entropy": "entropy, nats", "gap": "groups without variance − i.i.d.", "grad_norm": "gradient norm",
    }  # fmt: skip
    for label, colour in colours(groups).items():
        runs = groups[label]
        for axis, (key, title) in zip(axes.flat, panels.items()):
            kind, window = ("eval", 1) if key == "eval_accuracy" else ("train", options.smooth)
            plot_seeds(axis, runs, kind, key, window, color=colour, linewidth=1.6)
            axis.set_title(title)
        axes[0, 0].plot([], [], color=colour, linewidth=2.5, label=f"{label} ({len(runs)})")
        lines, shown = [line for run in runs for line in run["eval"]], []
        for step in ends:
            final[label] = [line["eval_accuracy"] for line in lines if line["step"] == step]
            shown.append(f"{np.mean(final[label] or math.nan):.3f}")
            shown[-1] += f" ± {np.std(final[label], ddof=1):.3f}" if len(final[label]) > 1 else ""
        lines = [line for run in runs for line in run["train"]]
        means = [float(np.mean([line[key] for line in lines]))
                 for key in ("completion_len", "degenerate_frac", "degenerate_iid")]  # fmt: skip
        rows.append([label, len(runs), max(line["step"] for line in lines), *shown, *means])
    axes[1, 1].axhline(0, color="black", linestyle="--", linewidth=1)
    axes[1, 2].set_yscale("log")
    axes[1, 2].yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes[1, 2].yaxis.set_major_formatter("{x:g}")
    axes[1, 2].yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for axis in axes[1]:
        axis.set_xlabel("step")
    title = (f"line: running mean of {options.smooth} steps, of accuracy none; mean over seeds, their number in "
             "brackets; band: ± sd")  # fmt: skip
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(5, len(groups)),
                  title=title, title_fontsize=8)  # fmt: skip
    accuracy = [f"accuracy ± sd at step {step}" for step in ends]
    table(["runs", "seeds", "steps", *accuracy, "length", "degenerate", "i.i.d."], rows)

    found = []
    flags = {label: {key: value for key, value in groups[label][0]["config"].items() if key not in FREE | {"script"}}
             for label in groups}  # fmt: skip
    for better, worse in ("sign_grpo", "grpo"), ("sign_grpo", "dr_grpo"), ("ep_grpo", "grpo"):
        pairs = [(a, b) for a in final for b in final if (a.split()[0], b.split()[0]) == (better, worse)]
        for label, other in pairs:
            a, b, mine, others = final[label], final[other], flags[label], flags[other]
            if a and b and ends[-1] > 0 and all(mine[key] == others[key] for key in mine.keys() & others.keys()):
                p, least = permutation_p(a, b), 1 / math.comb(len(a) + len(b), len(a))
                word = "clear" if p < 0.05 else "not clear" if least < 0.05 else "too few seeds to tell"
                points = 100 * (np.mean(a) - np.mean(b))
                found.append(f"{label} minus {other} at step {ends[-1]}: {points:+.1f} points, {word} "
                             f"(p = {p:.2g}, exact permutation test of {len(a)} and {len(b)} seeds)")  # fmt: skip
    gaps = {row[0]: row[-2] - row[-1] for row in rows}
    below = [label for label, gap in gaps.items() if gap < 0]
    found.append(f"groups without variance are {100 * np.mean(list(gaps.values())):+.1f} points from their i.i.d. "
                 f"prediction on average, below it in: {', '.join(below) or 'none'}")  # fmt: skip
    finish(figure, options, found)


# --- degeneracy ---
def degenerate_share(n, c, group):
    """Unbiased chance that `group` of n responses, c of them right, are all right or all wrong (as in pass@k)."""
    return (math.comb(c, group) + math.comb(n - c, group)) / math.comb(n, group)


def degeneracy(options):
    """Groups without variance: measured, and what one success rate for all problems would predict."""
    if options.samples < max(options.groups):
        raise BadInput(f"--samples {options.samples} must be at least the largest of --groups, {max(options.groups)}")
    groups, found = group_runs(read_runs(options.runs) if options.runs else []), []
    counts = successes(options)
    rates, rows = counts / options.samples, []  # (problems,)
    p, words = rates.mean(), {0: "no different, within 2 se", 1: "above it", -1: "BELOW it"}
    for G in options.groups:
        shares = np.array([degenerate_share(options.samples, int(c), G) for c in counts])
        predicted = float(p**G + (1 - p) ** G)
        # The prediction moves with the same problems: to first order, one's part in the gap is share - slope * rate.
        slope = G * (p ** (G - 1) - (1 - p) ** (G - 1))
        error = mean_se(shares - slope * rates)[1] if shares.any() else math.nan  # no case seen: it may still exist
        rows.append([G, *mean_se(shares), predicted, float(shares.mean()) - predicted, error])
        found.append(f"G = {G}: {shares.mean():.3f} against {predicted:.3f}, {words[clear(*rows[-1][-2:])]}"
                     + ", in the paper 0.69" * (G == 4))  # fmt: skip
    table(["G", "measured", "± se", "i.i.d. prediction", "gap", "± se"], rows)

    figure, axes = plt.subplots(1, 3 if groups else 2, figsize=(9, 3.2))
    axes[0].hist(rates, bins=np.linspace(0, 1, min(options.samples, 16) + 1), color=BLUE, edgecolor="white")
    axes[0].axvline(p, color="black", linestyle="--", label=f"mean {p:.2f}")
    axes[0].set(xlabel=f"right of {options.samples} responses, share", ylabel="problems", title="success by problem")
    G, measured, _, _, gap, error = (np.array(column) for column in zip(*rows))
    axes[1].errorbar(G, 100 * gap, 200 * error, fmt="o", color=BLUE, capsize=3, label="gap ± 2 se")
    axes[1].axhline(0, color=RED, linestyle="--", label="i.i.d. prediction")
    axes[1].set_xscale("log", base=2)
    axes[1].set_xticks(G, [f"{size}\n{share:.3f}" for size, share in zip(G, measured)])
    axes[1].set(xlabel="group size G, measured share", ylabel="points", title="groups without variance")
    axes[1].margins(0.1, 0.4)  # room for the legend
    moves, ends = [], (slice(None, options.smooth), slice(-options.smooth, None))
    for label, colour in colours(groups).items():
        for key, style in ("degenerate_frac", {"label": label}), ("degenerate_iid", {"ls": "--", "linewidth": 1}):
            plot_seeds(axes[2], groups[label], "train", key, options.smooth, color=colour, **style)
        moves.append([label] + [float(np.mean([line[key] for run in groups[label] for line in run["train"][end]]))
                                for end in ends for key in ("degenerate_frac", "degenerate_iid")])  # fmt: skip
        found.append(f"{label}: from {moves[-1][1]:.2f} to {moves[-1][3]:.2f} in training")
    if groups:
        print()
        table(["run", f"first {options.smooth} steps", "i.i.d.", f"last {options.smooth} steps", "i.i.d."], moves)
        axes[2].set(xlabel="step", ylim=(0, 1.02), title="in training (dashed: i.i.d.)")
    for axis in axes:
        axis.legend()
    finish(figure, options, found)


# --- rank ---
def singular_values(matrix):
    """Singular values of a (m, n) matrix in float64, from the Gram matrix of its shorter side."""
    matrix = matrix.double()
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()


def ranks(sigma):
    """Three meanings of "effective rank" for singular values (n,): stable, entropy, and 95 % of the energy.

    Stable rank: ||G||_F^2 / ||G||_2^2 = sum s^2 / max s^2. Entropy rank (Roy and Vetterli 2007): exp of the entropy of
    s / sum s. Third: how many of the largest carry 95 % of sum s^2. Each is 1 for rank 1; for n equal s the first two
    are n."""
    sigma = sigma.sort(descending=True).values
    energy = sigma.square()
    needed = (energy.cumsum(0) < 0.95 * energy.sum() * (1 - 1e-12)).sum() + 1
    entropy = torch.special.entr(sigma / sigma.sum()).sum()
    return (energy.sum() / energy[0]).item(), entropy.exp().item(), float(needed)


def group_ranks(model, batch, sizes, args, limit):
    """{R: [the ranks of the response matrix (3) and, on average, of the weight matrices (3); None without variance]}.

    The N responses of one problem are cut into N // R groups. Under GRPO the row of response i is A_i u_i, with u_i the
    gradient of its mean log-prob (factors that all rows share change no rank), so u_i is computed once for all sizes.
    The R x parameters matrix enters by its Gram matrix A_i A_j <u_i, u_j>, a sum over weights: at most `limit` numbers
    are held at once, at the price of another backward a response for each further chunk of weights."""
    N, result, alive = len(batch.mask), {R: [] for R in sizes}, []
    for R in sizes:
        for rows in torch.arange(N // R * R, device=batch.mask.device).split(R):
            part = grpo.Batch(batch.rewards[:, rows], batch.mask[rows])
            A = grpo.compute_advantages(part, args)[:, 0].double()  # (R,), the same for every token of a response
            if A.any():
                alive.append((R, rows, A, []))
            else:
                result[R].append(None)
    chunks, size = [[]], 0
    for weight in model.parameters() if alive else []:
        size += N * weight.numel()
        if chunks[-1] and size > limit:
            chunks.append([])
            size = N * weight.numel()
        chunks[-1].append(weight)
    gram = torch.zeros(N, N, dtype=torch.float64, device=batch.mask.device)
    per_token = grpo.compute_weights(batch, args)  # (N, T)
    for chunk in filter(None, chunks):
        for u in zip(*(response_gradient(model, batch, i, per_token, chunk, args) for i in range(N))):
            u = torch.stack(u).double()  # (N, *shape of the weight)
            gram += u.flatten(1) @ u.flatten(1).T
            for _, rows, A, by_weight in alive:
                summed = torch.tensordot(A, u[rows], 1)
                if summed.dim() == 2 and summed.any():  # a matrix, not a bias or a norm's scale
                    by_weight.append(ranks(singular_values(summed)))
    for R, rows, A, by_weight in alive:
        eigenvalues = torch.linalg.eigvalsh(A[:, None] * gram[rows][:, rows] * A)
        both = [*ranks(eigenvalues.clamp(min=0).sqrt()), *np.mean(by_weight, 0)] if by_weight else None
        result[R].append(both)
    return result


def rank(options):
    """The effective rank of GRPO's gradient by group size, under six definitions."""
    if min(options.groups) < 2 or options.samples < max(options.groups):
        raise BadInput(f"--groups must be at least 2, and --samples {options.samples} at least the largest of them")
    model, tokenizer, problems, args = set_up(options)
    results, kinds = {R: [] for R in options.groups}, ("stable", "entropy", "95 %")
    for batch in draw(model, tokenizer, problems, options.samples, args):
        for R, some in group_ranks(model, batch, options.groups, args, options.memory_gb * 2**30 / 8).items():
            results[R] += some
    kept = {R: [x for x in some if x] for R, some in results.items()}
    means = {R: np.mean(some, 0) for R, some in kept.items() if some}
    if not means:
        raise BadInput("every group was all right or all wrong, so GRPO has no gradient: more --problems, or others")
    names = [f"{matrix}, {kind}" for matrix in ("responses", "weights") for kind in kinds]
    table(["R", "groups", "excluded (no variance)", *names],
          [[R, len(kept[R]), len(results[R]) - len(kept[R]), *map(float, means[R])] for R in means])

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    titles = "responses: R × parameters, one row each", "weights: the group's gradient, mean over matrices"
    for axis, title, first in zip(axes, titles, (0, 3)):
        for i, kind in enumerate(kinds):
            y = [row[first + i] for row in means.values()]
            axis.plot(list(means), y, "os^"[i] + "-", color=LIST[i], label=kind)
        axis.axhline(2, color="black", linestyle="--", linewidth=1, label="the paper: ≈ 2")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(list(means), list(means))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="group size R", title=title)
    axes[0].plot(list(means), list(means), color="grey", linestyle=":", label="R, the most possible")
    axes[0].set_ylabel("effective rank")
    axes[0].legend()
    tested = [R for R in (2, 4, 8) if R in means] or list(means)
    holds, said = [], []
    for i, name in enumerate(names):
        values = [means[R][i] for R in tested]
        holds.append(max(abs(x - 2) for x in values) <= 0.5)
        said.append(f"{name}: {'holds' if holds[-1] else 'does not hold'}, {', '.join(f'{x:.1f}' for x in values)}")
    found = [f"at R = {', '.join(map(str, tested))}, 2 ± 0.5 holds by {sum(holds)} of 6 definitions", *said]
    finish(figure, options, found)


# --- length ---
def fit_exponent(lengths, values, clusters):
    """(k, se) of values ~ lengths^k, (n,) each: least squares in logarithms; se allows for related responses.

    Responses to one problem, a cluster, are no independent draws: the sandwich estimate sums their residuals first."""
    x, y = np.log(lengths), np.log(values)
    x, y, clusters = x - x.mean(), y - y.mean(), np.asarray(clusters)
    k = (x @ y) / (x @ x)
    sums = [(x * (y - k * x))[clusters == cluster].sum() for cluster in np.unique(clusters)]
    return float(k), float(np.linalg.norm(sums) / (x @ x))


def length(options):
    """What a response contributes to the gradient, by its length, from GRPO (alpha 0) to Dr. GRPO (alpha 1)."""
    at_least_two(options)
    model, tokenizer, problems, args = set_up(options, length_alpha)
    alphas, weights = options.alphas, list(model.parameters())
    lengths, clusters, norms, parts, sizes, rights = [], [], [], [], [], []  # one entry a response with an advantage
    for problem, batch in enumerate(draw(model, tokenizer, problems, options.samples, args)):
        A = length_alpha.compute_advantages(batch, args)  # (N, T)
        W = [length_alpha.compute_weights(batch, dataclasses.replace(args, alpha=alpha)) for alpha in alphas]
        for i in A[:, 0].nonzero()[:, 0].tolist():
            mean = (batch.mask / batch.mask.sum(1, keepdim=True)).float()  # (N, T)
            gradient = response_gradient(model, batch, i, mean, weights, args)
            norms.append(math.sqrt(sum(g.double().square().sum().item() for g in gradient)))
            parts.append([(w * A.abs())[i].sum().item() for w in W])  # sum_t W |A|, by alpha
            sizes.append(A[i, 0].abs().item())
            rights.append(batch.rewards[0, i].item())
            lengths.append(int(batch.mask[i].sum()))
            clusters.append(problem)
    if len(set(lengths)) < 3:
        raise BadInput(f"{len(lengths)} responses with an advantage have {len(set(lengths))} lengths: more --problems")
    lengths, clusters, norms, parts, sizes, rights = map(np.array, (lengths, clusters, norms, parts, sizes, rights))
    rows, found = [], []
    # W and A are equal along a response, so || sum_t W A grad log pi || = (sum_t W |A|) || grad of the mean log pi ||.
    shares = parts * norms[:, None]  # (n, alphas)
    shares /= shares.mean(0)  # 1 is an equal share
    short, long = lengths <= np.quantile(lengths, 0.25), lengths >= np.quantile(lengths, 0.75)
    fits = np.array([[fit_exponent(lengths, y[:, a], clusters) for y in (parts, shares)] for a in range(len(alphas))])
    for alpha, fit, share in zip(alphas, fits, shares.T):
        ends = float(share[short].mean()), float(share[long].mean())
        rows.append([alpha, *(f"{k:.2f} ± {se:.2f}" for k, se in fit), *ends])
    table(["alpha", "weight: k ± se", "gradient: k ± se", "share of the shortest quarter", "of the longest"], rows)
    print("an equal share is 1\n")
    # Right and wrong responses differ in length, in |A| and in how surprising they are: a table for each.
    rows = []
    for name, kept in ("all", rights >= 0), ("right", rights == 1), ("wrong", rights == 0):
        if len(set(lengths[kept])) > 2:
            ks = [fit_exponent(lengths[kept], y[kept], clusters[kept])[0] for y in (sizes, norms * lengths)]
            rows.append([name, kept.sum(), lengths[kept].min(), lengths[kept].max(), *(f"{k:.2f}" for k in ks)])
    table(["responses", "number", "shortest", "longest", "|A|: k", "gradient of log pi, no weight: k"], rows)
    print("the last is 1 if the gradients of a response's tokens agree, 0.5 if they are unrelated")
    words = {0: "as claimed", 1: "above the claim", -1: "below the claim"}
    for i in dict.fromkeys((0, len(alphas) - 1)):
        said = [f"{what} ~ L^{k:.2f} ± {se:.2f}, {words[clear(k - alphas[i], se)]}"
                for what, (k, se) in zip(("weight", "gradient"), fits[i])]  # fmt: skip
        found.append(f"alpha {alphas[i]:g}: {'; '.join(said)}")
    found.append(f"|A| alone ~ L^{rows[0][-2]}, grad log pi ~ L^{rows[0][-1]}: the gradient would not depend on length "
                 f"at alpha = {alphas[0] - fits[0][1][0]:.2f}")  # fmt: skip

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 7)))[1:-1]
    bins = [np.digitize(lengths, edges) == b for b in range(len(edges) + 1)]
    for alpha, share, shade in zip(alphas, shares.T, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(alphas)))):
        points = [(lengths[some].mean(), share[some].mean()) for some in bins if some.any()]
        axes[0].plot(*zip(*points), "o-", color=shade, label=f"α = {alpha:g}")
    axes[0].axhline(1, color="black", linestyle="--", linewidth=1)
    axes[0].set(xlabel="response length, tokens (means of bins)", ylabel="share of the gradient (1: equal)",
                title="a response's share by its length")  # fmt: skip
    for i, name in enumerate(("weight, Σ W|Â|, ± 2 se", "gradient, ‖Σ W Â ∇ log π‖, ± 2 se")):
        axes[1].errorbar(alphas, fits[:, i, 0], 2 * fits[:, i, 1], fmt="so"[i], capsize=3, color=LIST[i], label=name)
    axes[1].plot(alphas, alphas, color="black", linestyle="--", linewidth=1, label="the paper: k = α")
    axes[1].set(xlabel="α  (0: 1/L as GRPO, 1: 1/C as Dr. GRPO)", ylabel="k",
                title="fitted exponent k of share ~ length$^k$")  # fmt: skip
    for axis in axes:
        axis.legend()
    finish(figure, options, found)


# --- tokens ---
def what_ep_grpo_sees(batch, args):
    """{name: (N, T)}: entropy, gate, log-ratio, bucket of progress and final advantage of every token of a group."""
    # The gate does not depend on rewards: given rewards that differ, it is what multiplies grpo's advantage.
    unlike = dataclasses.replace(batch, rewards=torch.arange(len(batch.mask), device=batch.mask.device)[None] % 2.0)
    gated = ep_grpo.compute_advantages(unlike, dataclasses.replace(args, progress_weight=0.0))
    # The bucket has no function of its own: this is step (3) of ep_grpo.compute_advantages.
    running = torch.where(batch.mask, batch.entropies, 0.0).double().cumsum(1)
    progress = torch.where(running[:, -1:] > 0, running / running[:, -1:], 0.0)
    return {
        "entropy": batch.entropies,
        "gate": gated / torch.where(batch.mask, grpo.compute_advantages(unlike, args), 1.0),
        "log-ratio": batch.old_logps - batch.ref_logps,
        "bucket": (args.buckets * progress).floor().clamp(max=args.buckets - 1),
        "advantage": ep_grpo.compute_advantages(batch, args),
    }


def token_colours(values, top=None):
    """(n, 3) pale colours: brown to violet around 0 where values are negative, else white to blue up to `top`."""
    if min(values) < 0:
        rgb = plt.get_cmap("PuOr")(0.5 + 0.4 * values / np.abs(values).max())
    else:
        rgb = plt.get_cmap("Blues")(0.6 * values / max(top or max(values), 1e-9))
    return rgb[:, :3]


def ink(colour):
    """Black or white, whichever can be read on an RGB colour."""
    return "black" if colour @ [0.3, 0.6, 0.1] > 0.45 else "white"


def token_page(title, texts, columns, shades):
    """A self-contained HTML page: the response once for each quantity, all values in the tooltips, all text escaped."""
    parts = ["<!DOCTYPE html><html lang=en><meta charset=utf-8><title>What EP-GRPO sees</title><style>"
             "body{font:15px/1.8 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}p{white-space:pre-wrap}"
             "span{padding:2px;border-radius:3px;font-family:monospace}</style><h1>What EP-GRPO sees</h1>"
             f"<p>{html.escape(title)}. Hover over a token for its values.</p>"]  # fmt: skip
    for name, values in columns.items():
        parts.append(f"<h2>{name}: {min(values):.3g} to {max(values):.3g}</h2><p>")
        for t, text in enumerate(texts):
            tip = html.escape(", ".join(f"{key} {column[t]:.3g}" for key, column in columns.items()))
            style = f"background:{matplotlib.colors.to_hex(shades[name][t])};color:{ink(shades[name][t])}"
            parts.append(f'<span style="{style}" title="{tip}">{html.escape(text)}</span>')
        parts.append("</p>")
    return "".join(parts) + "</html>\n"


def tokens(options):
    """One response, its tokens coloured by what EP-GRPO computes; an HTML page beside the picture shows it whole."""
    at_least_two(options)
    model, tokenizer, problems, args = set_up(options, ep_grpo)
    name = options.reference or find_model(options.model)[1].get("model") or grpo.TINY_DIR
    reference, _ = load_model(find_model(name)[0], args.device, trainable=False)
    if reference.get_input_embeddings().num_embeddings != model.get_input_embeddings().num_embeddings:
        raise BadInput(f"{name} has another vocabulary than {args.model}: --reference is the model before training")
    groups = []
    for problem, batch in zip(problems, draw(model, tokenizer, problems, options.samples, args)):
        groups.append((problem, batch))
        if len(batch.rewards.unique()) > 1:
            break
    problem, batch = groups[-1] if len(batch.rewards.unique()) > 1 else groups[0]  # the first with rewards that differ
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    batch.ref_logps, _ = grpo.score(reference, batch, args)
    seen, lengths, mask = what_ep_grpo_sees(batch, args), batch.mask.sum(1), batch.mask
    row = int(lengths.argmax()) if options.row is None else options.row
    if not 0 <= row < len(lengths):
        raise BadInput(f"--row {row}: the group has rows 0 to {len(lengths) - 1}")
    L = int(lengths[row])
    texts = [tokenizer.decode([token]) for token in batch.input_ids[row, -mask.shape[1] :][:L].tolist()]
    columns = {name: values[row, :L].cpu().numpy() for name, values in seen.items()}
    shades = {name: token_colours(x, {"gate": 1, "bucket": args.buckets}.get(name)) for name, x in columns.items()}
    rewards = [round(x) for x in batch.rewards[0].tolist()]
    title = f"{problem['question']}   answer {problem['answer']}, reward {rewards[row]}, its group's {rewards}"
    table(["quantity, over all tokens of the group", "smallest", "mean", "largest"],
          [[name, *(float(f(x[mask])) for f in (torch.min, torch.mean, torch.max))] for name, x in seen.items()])

    wide, show = 16, min(L, 64)  # tokens in a line of the picture, and in all of it
    height = len(columns) + 1.7
    figure, axis = plt.subplots(figsize=(9, 0.4 + 0.28 * height * math.ceil(show / wide)))
    for t in range(show):
        x, y = t % wide, -height * (t // wide)
        shown = texts[t] if texts[t].isprintable() and texts[t].strip() else repr(texts[t])[1:-1]
        shown = shown if len(shown) < 9 else shown[:7] + "…"
        size = 10 if len(shown) < 6 else 7
        axis.text(x + 0.5, y + 1.4, shown, ha="center", va="center", weight="bold", size=size, parse_math=False)
        for i, (name, values) in enumerate(columns.items()):
            axis.add_patch(plt.Rectangle((x, y - i), 0.96, 0.92, color=shades[name][t], linewidth=0))
            number = f"{float(values[t]):z.{0 if name == 'bucket' else 2}f}"
            axis.text(x + 0.5, y - i + 0.42, number, ha="center", va="center", fontsize=8, color=ink(shades[name][t]))
            if x == 0:
                axis.text(-0.15, y - i + 0.42, name, ha="right", va="center")
    axis.set(xlim=(-1.6, min(show, wide)), ylim=(-height * math.ceil(show / wide) + 1.7, 2))
    axis.set_title(title[:100] + (f", first {show} of {L} tokens" if show < L else ""), parse_math=False)
    axis.axis("off")

    entropies = seen["entropy"][mask].sort(descending=True).values
    share = float(entropies[: max(1, len(entropies) // 5)].sum() / entropies.sum().clamp(min=1e-9))
    outcome, final = grpo.compute_advantages(batch, args)[mask], seen["advantage"][mask]
    found = [f"the most uncertain fifth of the group's tokens carries {share:.0%} of the entropy"]
    if not seen["log-ratio"][mask].any():
        found.append("model and reference agree everywhere, so there is no progress term: give a trained --model")
    elif outcome.any():
        turned = (outcome * final < 0).float().mean().item()
        found.append(f"the progress term turns the sign of {turned:.1%} of the tokens against the outcome's")
    else:
        kept = (final != 0).float().mean().item()
        found.append(f"rewards are equal: GRPO is silent, {kept:.0%} of the tokens keep a signal")
    page = Path(options.out).with_suffix(".html")
    finish(figure, options, found)
    page.write_text(token_page(title, texts, columns, shades), encoding="utf-8")
    print(f"Page: {page}")


# --- passk ---
def passk(options):
    """pass@k of several models on the same problems, the first one being the base."""
    n, base, found = options.samples, options.model[0], []
    ks = [2**i for i in range(n.bit_length())]  # 1, 2, 4, ... up to n
    if len(set(options.model)) < 2:
        raise BadInput("--model takes two models or more, the base first")
    run = next(filter(None, (find_model(name)[1] for name in options.model)), None)  # the problems of the first run
    counts = {name: successes(options, name, run) for name in options.model}
    passes = {name: np.array([[grpo.pass_at_k(n, int(c), k) for k in ks] for c in counts[name]]) for name in counts}
    table(["model", *(f"pass@{k}" for k in ks), "problems never solved"],
          [[name, *map(float, x.mean(0)), (counts[name] == 0).sum()] for name, x in passes.items()])

    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    labels = {name: f"{find_model(name)[1].get('script', 'model')} {name[-50:]}" for name in passes}
    shades = colours(list(labels.values()))  # an algorithm's own colour for its runs, grey for other models
    for i, (name, x) in enumerate(passes.items()):
        colour = shades[labels[name]]
        mean, error = np.array([mean_se(column) for column in x.T]).T
        axis.plot(ks, mean, "os^Dv"[i % 5] + "-", color=colour, label=name[-60:])
        high = np.minimum(mean + 2 * error, 1)
        axis.fill_between(ks, mean - 2 * error, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, ks)
    axis.set(xlabel="k, responses a problem", ylabel="pass@k (band: ± 2 se)")
    axis.set_title(f"{len(x)} problems, {n} responses each")
    axis.legend()

    for name in list(passes)[1:]:
        (first, first_se), (last, last_se) = (mean_se((passes[name] - passes[base])[:, i]) for i in (0, -1))  # paired
        verdict = {
            (1, 1): "mainly search compression, some reach" if first > last else "reach, no less than compression",
            (1, 0): "search compression", (0, 1): "reach", (0, 0): "no clear change",
            (1, -1): "search compression at the cost of reach", (-1, 1): "reach at the cost of the first answer",
        }.get((clear(first, first_se), clear(last, last_se)), "a loss")  # fmt: skip
        found.append(f"{name} minus {base}: {100 * first:+.1f} ± {100 * first_se:.1f} points at k = 1, "
                     f"{100 * last:+.1f} ± {100 * last_se:.1f} at k = {ks[-1]}: {verdict}")  # fmt: skip
        never, solved = counts[base] == 0, counts[name] > 0
        found.append(f"it solves {(never & solved).sum()} of {never.sum()} problems that the base never does, and "
                     f"loses {(~never & ~solved).sum()} of {(~never).sum()} others")  # fmt: skip
    if (ceiling := passes[base][:, -1].mean()) > 0.9:
        found.append(f"the base has {ceiling:.2f} at k = {ks[-1]}: little reach to gain, harder problems tell more")
    finish(figure, options, found)


# --- the command line ---
def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def parse_options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(function, problems=None, samples=None, groups=False, smooth=False):
        sub = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("--out", default=f"runs/{function.__name__}.png", help="the picture")
        if smooth:
            sub.add_argument("--smooth", type=positive, default=5, help="steps in a running mean")
        if groups:
            sub.add_argument("--groups", type=positive, nargs="+", default=[2, 4, 8, 16], help="group sizes")
        if problems:
            many = {"nargs": "+", "required": True} if function is passk else {}
            sub.add_argument("--model", **many, help="hub name, folder or run; the base first (none: the tiny model)")
            sub.add_argument("--dataset", help="as in grpo.py, or a benchmark (none: held-out problems of the run)")
            sub.add_argument("--split", default="test", help="which part of it")
            sub.add_argument("--problems", type=positive, default=problems, help="how many problems")
            sub.add_argument("--samples", type=positive, default=samples, help="responses a problem")
            sub.add_argument("--seed", type=int, default=0, help="of the samples")
            for flag, kind in {"dataset_config": str, "instruction": str, "temperature": float, "device": str,
                               "max_prompt_tokens": positive, "max_new_tokens": positive}.items():  # fmt: skip
                sub.add_argument(f"--{flag}", type=kind, help="as in grpo.py (none: as in the run)")
        return sub

    sub = command(curves, smooth=True)
    sub.add_argument("runs", nargs="+", help="run folders; those that differ by the seed only become one curve")
    sub = command(degeneracy, 200, 32, groups=True, smooth=True)
    sub.add_argument("--runs", nargs="+", default=[], help="run folders: the share during training")
    sub = command(rank, 48, 16, groups=True)
    sub.add_argument("--memory_gb", type=float, default=2.0, help="gradients held at once; less memory takes longer")
    sub = command(length, 100, 8)
    sub.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="0 GRPO, 1 Dr. GRPO")
    sub = command(tokens, 100, 8)
    sub.add_argument("--reference", help="the model before training (none: what the run began with)")
    sub.add_argument("--row", type=int, help="which response of the group (none: the longest)")
    command(passk, 100, 32)
    return parser.parse_args(argv)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Glyph")  # a token in a script that matplotlib's font lacks
    try:
        options = parse_options()
        options.function(options)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
