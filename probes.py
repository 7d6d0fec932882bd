"""What analysis.py measures on a model: each measure_... function returns its tables and a figure.

A model is a hub name, a folder, or a run. A run stands for its latest checkpoint and brings its
own problems and flags; without a model it is the tiny one in tests/tiny.
"""

import dataclasses
import json
import math
from pathlib import Path

import grpo  # before torch: common sets up torch's memory allocator
import ep_grpo
import length_alpha
import matplotlib.pyplot as plt
import numpy as np
import torch
from common import (
    BadInput,
    check_flags,
    checkpoints,
    load_model,
    parse_args,
    token_logps_and_entropies,
)
from tqdm import tqdm

FLAGS = {  # the scripts' flags that can be given here too
    "instruction": str,
    "temperature": float,
    "device": str,
    "seed": int,
    "max_prompt_tokens": int,
    "max_new_tokens": int,
}


def add_commands(add):
    """Add the measurements to analysis.py's command line; add(name, function) makes a command."""
    for name, function, problems, samples in (
        ("degeneracy", measure_degeneracy, 200, 32),
        ("rank", measure_rank, 48, 16),
        ("share", measure_share, 100, 8),
        ("tokens", show_tokens, 100, 8),
        ("passk", measure_pass_at_k, 100, 32),
    ):
        command = add(name, function)
        several = {"nargs": "+", "required": True} if name == "passk" else {}
        command.add_argument("--model", **several, help="hub name, folder, or run; the base first")
        command.add_argument("--eval_dataset", "--dataset", help="problems (default: the run's)")
        text = "number of problems (default: %(default)s)"
        command.add_argument("--problems", type=int, default=problems, help=text)
        text = "responses per problem (default: %(default)s)"
        command.add_argument("--samples", type=int, default=samples, help=text)
        for flag, kind in FLAGS.items():
            command.add_argument(f"--{flag}", type=kind, help="as in grpo.py")
        if name in ("degeneracy", "rank"):
            sizes = {"nargs": "+", "default": [2, 4, 8, 16], "help": "sizes (default: 2 4 8 16)"}
            command.add_argument("--groups", type=int, **sizes)
        if name == "share":
            alphas = {"nargs": "+", "default": [0.0, 0.25, 0.5, 0.75, 1.0], "help": "values"}
            command.add_argument("--alphas", type=float, **alphas)
        if name == "tokens":
            command.add_argument("--reference", help="the model before training")
            command.add_argument("--row", type=int, help="response (default: the longest)")


# --- the model, its problems and its responses ---
def find_model(name):
    """(what load_model takes, the flags of its run): {} for a model that is not one of our runs."""
    name = name or grpo.TINY_DIR
    folder = Path(name)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return name, {}
    if "script" not in config:
        return name, {}
    if run != folder:
        return name, config
    if not checkpoints(run):
        raise BadInput(f"the run in {run} has no checkpoint yet: give another --model")
    return str(checkpoints(run)[-1]), config


def set_up(options, script=grpo, name=None, run=None, trainable=True):
    """(model, tokenizer, problems, args): the flags of the run, and over them those given here."""
    if options.samples < 2 or options.problems < 1:
        raise BadInput("--samples must be at least 2, and --problems at least 1")
    path, own = find_model(name or options.model)
    known = {field.name for field in dataclasses.fields(script.Args)}
    flags = {key: value for key, value in (run or own).items() if key in known}
    given = {key: getattr(options, key) for key in (*FLAGS, "eval_dataset")}
    flags |= {key: value for key, value in given.items() if value is not None}
    flags |= {"model": path, "eval_problems": options.problems, "steps": 0}
    if Path(path).resolve() == Path(grpo.TINY_DIR):
        del flags["model"]  # so that its own settings are the defaults
    argv = [f"--{key}={value}" for key, value in flags.items() if value is not None]
    args = parse_args(script.Args, script.TINY, argv)
    check_flags(args, 1)
    rank = args.lora_rank
    model, tokenizer = load_model(args.model, args.device, trainable, rank, args.seed)
    _, problems = script.load_problems(tokenizer, args)
    if not problems:
        raise BadInput("no held-out problem can be used: name others by --eval_dataset")
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


def response_gradient(model, batch, row, coefficients, weights, args):
    """Gradient of sum_t coefficients[row, t] log pi(token t of the row) in each of `weights`."""
    used = batch.attention_mask[row].bool()
    length = int(batch.mask[row].sum())
    ids = batch.input_ids[row][used][None]  # (1, S + L) without padding
    logps, _ = token_logps_and_entropies(
        model, ids, torch.ones_like(ids), length, args.temperature)  # (1, L)  # fmt: skip
    return torch.autograd.grad((coefficients[row, :length] * logps[0]).sum(), weights)


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
    if options.samples < max(options.groups):
        raise BadInput(f"--samples must be at least the largest of --groups, {max(options.groups)}")
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
        gap = float(shares.mean()) - predicted
        rows.append([G, *mean_and_error(shares), predicted, gap, error])

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    axes[0].hist(rates, bins=np.linspace(0, 1, min(options.samples, 16) + 1), edgecolor="white")
    axes[0].axvline(p, color="black", linestyle="--", label=f"mean {p:.2f}")
    axes[0].set(xlabel="share of right responses", ylabel="problems", title="success by problem")
    sizes, _, _, _, gaps, errors = (np.array(column) for column in zip(*rows))
    axes[1].errorbar(sizes, gaps, 2 * errors, fmt="o", capsize=3)
    axes[1].axhline(0, color="black", linestyle="--", label="i.i.d. prediction")
    axes[1].set(xlabel="group size G", title="zero-variance share − i.i.d. (± 2 standard errors)")
    use_powers_of_two(axes[1], options.groups)
    for axis in axes:
        axis.legend()
    caption = f"Shares of zero-variance groups, from {options.samples} responses per problem."
    header = ["G", "measured", "error", "i.i.d. prediction", "difference", "error"]
    return [(caption, header, rows)], figure


# --- rank ---
RANKS = ["stable", "entropy", "95 %"]


def singular_values(matrix):
    """Singular values of a (m, n) matrix in float64, from the Gram matrix of its shorter side."""
    matrix = matrix.double()
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    return torch.linalg.eigvalsh(matrix @ matrix.T).clamp(min=0).sqrt()


def effective_ranks(sigma):
    """Three meanings of "effective rank", from singular values (n,).

    Stable: sum s^2 / max s^2. Entropy (Roy and Vetterli 2007): exp of the entropy of s / sum s.
    95 %: how many of the largest carry 95 % of sum s^2. Each is 1 for a matrix of rank 1.
    """
    sigma = sigma.sort(descending=True).values
    energy = sigma.square()
    needed = (energy.cumsum(0) < 0.95 * energy.sum() * (1 - 1e-12)).sum() + 1
    entropy = torch.special.entr(sigma / sigma.sum()).sum()
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
    weights = trained_weights(model)
    rows = [response_gradient(model, batch, i, per_token, weights, args) for i in range(N)]
    u = [torch.stack(parts).double() for parts in zip(*rows)]  # (N, *shape of a weight) each
    gram = sum(x.flatten(1) @ x.flatten(1).T for x in u)  # (N, N)
    result = {R: [] for R in sizes}
    for R in sizes:
        for some in torch.arange(N // R * R, device=batch.mask.device).split(R):
            group = grpo.Batch(rewards=batch.rewards[:, some], mask=batch.mask[some])
            A = grpo.compute_advantages(group, args)[:, 0].double()  # (R,)
            summed = [torch.tensordot(A, x[some], 1) for x in u]
            matrices = [x for x in summed if x.dim() == 2 and x.any()]
            if not A.any() or not matrices:
                result[R].append(None)
                continue
            eigenvalues = torch.linalg.eigvalsh(A[:, None] * gram[some][:, some] * A)
            by_weight = [effective_ranks(singular_values(x)) for x in matrices]
            responses = effective_ranks(eigenvalues.clamp(min=0).sqrt())
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
        raise BadInput("all groups have zero variance, so GRPO has no gradient: other problems?")

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    titles = ["responses: R × parameters", "weights: mean over weight matrices"]
    for axis, title, first in zip(axes, titles, (0, 3)):
        for i, name in enumerate(RANKS):
            axis.plot(list(means), [row[first + i] for row in means.values()], "o-", label=name)
        axis.axhline(2, color="black", linestyle="--", linewidth=1, label="the paper: about 2")
        axis.set(xlabel="group size R", title=title)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        use_powers_of_two(axis, list(means))
    axes[0].plot(list(means), list(means), color="grey", linestyle=":", label="R, the largest")
    axes[0].set_ylabel("effective rank")
    axes[0].legend()
    header = ["R", "groups", "zero-variance groups"]
    header += [f"{matrix}: {name}" for matrix in ("responses", "weights") for name in RANKS]
    rows = [[R, len(kept[R]), len(found[R]) - len(kept[R]), *map(float, means[R])] for R in means]
    return [("Means over the groups that have a gradient.", header, rows)], figure


# --- share ---
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
    alphas = options.alphas
    found = []  # per response with an advantage: problem, length, gradient's norm, weight by alpha
    groups = draw_groups(model, tokenizer, problems, options.samples, args)
    for number, batch in enumerate(groups):
        A = length_alpha.compute_advantages(batch, args)  # (N, T)
        W = [length_alpha.compute_weights(batch, dataclasses.replace(args, alpha=alpha))
             for alpha in alphas]  # fmt: skip
        mean = batch.mask / batch.mask.sum(1, keepdim=True)  # (N, T)
        for i in A[:, 0].nonzero()[:, 0].tolist():
            parts = response_gradient(model, batch, i, mean, trained_weights(model), args)
            norm = math.sqrt(sum(part.double().square().sum().item() for part in parts))
            weights = [(w * A.abs())[i].sum().item() for w in W]
            found.append([number, batch.mask[i].sum().item(), norm, *weights])
    if len({length for _, length, *_ in found}) < 3:
        raise BadInput(f"only {len(found)} responses have an advantage, of too few lengths: "
                       "more --problems")  # fmt: skip
    clusters, lengths, norms, *weights = np.array(found).T
    # W and A are equal along a response, so the norm of its part of the gradient is a product.
    shares = [weight * norms / (weight * norms).mean() for weight in weights]  # 1: an equal share
    fits = [
        [fit_exponent(lengths, weight, clusters), fit_exponent(lengths, share, clusters)]
        for weight, share in zip(weights, shares)
    ]
    rows = []
    short = lengths <= np.quantile(lengths, 0.25)
    long = lengths >= np.quantile(lengths, 0.75)
    for alpha, (weight, gradient), share in zip(alphas, fits, shares):
        ends = float(share[short].mean()), float(share[long].mean())
        rows.append([alpha, *weight, *gradient, *ends])
    caption = "Fits of share ~ L^k, with standard errors; mean shares, where 1 is an equal one."
    header = ["alpha", "k of the weight", "error", "k of the gradient", "error"]
    header += ["share of the shortest quarter", "share of the longest quarter"]
    return [(caption, header, rows)], plot_shares(lengths, shares, alphas, fits)


def plot_shares(lengths, shares, alphas, fits):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 7)))[1:-1]
    bins = np.digitize(lengths, edges)
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(alphas)))
    for alpha, share, shade in zip(alphas, shares, shades):
        x = [lengths[bins == b].mean() for b in np.unique(bins)]
        y = [share[bins == b].mean() for b in np.unique(bins)]
        axes[0].plot(x, y, "o-", color=shade, label=f"α = {alpha:g}")
    axes[0].axhline(1, color="black", linestyle="--", linewidth=1)
    axes[0].set(xlabel="response length, tokens", title="share of the gradient (1: equal)")
    for i, name in enumerate(["weight, Σ W|Â|", "gradient, ‖Σ W Â ∇ log π‖"]):
        k, error = np.array([fit[i] for fit in fits]).T
        axes[1].errorbar(alphas, k, 2 * error, fmt="so"[i], capsize=3, label=name)
    axes[1].plot(alphas, alphas, "--", color="black", linewidth=1, label="the paper: k = α")
    axes[1].set(xlabel="α  (0: GRPO, 1: Dr. GRPO)", title="k of share ~ L$^k$ (± 2 errors)")
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


def draw_unequal_group(options, model, tokenizer, problems, args):
    """(problem, batch): the first group whose rewards differ, else the first of all."""
    first = None
    groups = draw_groups(model, tokenizer, problems, options.samples, args)
    for problem, batch in zip(problems, groups):
        first = first or (problem, batch)
        if len(batch.rewards.unique()) > 1:
            return problem, batch
    return first


def show_tokens(options):
    """One response, its tokens coloured by what EP-GRPO computes for them.

    Claims (EP-GRPO paper): tokens are informative to very different degrees; a zero-variance group
    need not be silent.
    """
    model, tokenizer, problems, args = set_up(options, ep_grpo)
    name = options.reference or find_model(options.model)[1].get("model")
    reference, _ = load_model(find_model(name)[0], args.device, trainable=False)
    sizes = [len(x.get_input_embeddings().weight) for x in (model, reference)]
    if sizes[0] != sizes[1]:
        raise BadInput("--reference has another vocabulary: give the model before training")
    problem, batch = draw_unequal_group(options, model, tokenizer, problems, args)
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    batch.ref_logps, _ = grpo.score(reference, batch, args)
    seen = what_ep_grpo_sees(batch, args)
    lengths = batch.mask.sum(1)
    row = int(lengths.argmax()) if options.row is None else options.row
    if not 0 <= row < len(lengths):
        raise BadInput(f"--row {row}: the group has rows 0 to {len(lengths) - 1}")
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
    caption = "Over all tokens of the group:"
    return [(caption, ["quantity", "smallest", "mean", "largest"], rows),
            ("", ["share", ""], facts)], figure  # fmt: skip


def colour_tokens(values, top=None):
    """(n, 3) pale colours: brown to violet around 0 if some are negative, else white to blue."""
    if min(values) < 0:
        return plt.get_cmap("PuOr")(0.5 + 0.4 * values / np.abs(values).max())[:, :3]
    return plt.get_cmap("Blues")(0.6 * values / max(top or max(values), 1e-9))[:, :3]


def readable_ink(colour):
    """Black or white, whichever can be read on an RGB colour."""
    return "black" if colour @ [0.3, 0.6, 0.1] > 0.45 else "white"


def plot_tokens(columns, texts, title, buckets, wide=16, most=64):
    """Up to `most` tokens in lines of `wide`, and under each its values."""
    shown = min(len(texts), most)
    height = len(columns) + 1.7
    lines = math.ceil(shown / wide)
    figure, axis = plt.subplots(figsize=(9, 0.4 + 0.28 * height * lines))
    tops = {"gate": 1, "bucket": buckets}
    shades = {name: colour_tokens(values, tops.get(name)) for name, values in columns.items()}
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


# --- pass@k ---
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
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    for name, values in passes.items():
        mean, error = np.array([mean_and_error(column) for column in values.T]).T
        line = axis.plot(ks, mean, "o-", label=name[-60:])[0]
        high = np.minimum(mean + 2 * error, 1)
        axis.fill_between(ks, mean - 2 * error, high, color=line.get_color(), alpha=0.15)
    use_powers_of_two(axis, ks)
    axis.set(xlabel="k, responses per problem", ylabel="pass@k (bands: ± 2 standard errors)")
    axis.legend()

    base = options.model[0]
    rows = []
    differences = []
    for name, values in passes.items():
        solved = counts[name] > 0
        rows.append([name, *map(float, values.mean(0)), int((~solved).sum())])
        if name != base:
            first, last = (mean_and_error((values - passes[base])[:, i]) for i in (0, -1))
            never = counts[base] == 0
            won = f"{(never & solved).sum()} of {never.sum()}"
            lost = f"{(~never & ~solved).sum()} of {(~never).sum()}"
            differences.append([name, *first, *last, won, lost])
    header = ["model", *(f"pass@{k}" for k in ks), "problems never solved"]
    tables = [(f"{len(counts[base])} problems, {n} responses each.", header, rows)]
    header = [f"minus {base}", "at k = 1", "error", f"at k = {ks[-1]}", "error"]
    header += ["solved that the base never solves", "never solved that the base solves"]
    return tables + [("Paired differences:", header, differences)], figure
