"""Sign advantage: grpo.py with a constant baseline in place of the group's mean.

Where a group is all wrong or all right, GRPO's advantage is 0 and the prompt teaches nothing. The
advantage 2r - 1 is never 0. In an all-wrong group it makes the sampled responses less likely, which
is the gradient of pass@G = 1 - (1 - p)^G, the chance that one of G responses is right.

    advantage   A_i = 2 r_i - 1, so +1 or -1      the same for every token of response i
    weight      W_it = mask_it / C / B            C = --max_new_tokens, a constant

Paper: Gradient Starvation in Binary-Reward GRPO (arXiv:2605.07689). Differs from grpo.py in both
functions and needs rewards of 0 and 1. How it fails: without a group's mean the variance is larger,
and a weak model lowers nearly every sampled token without seeing a better one. It can collapse to
0. Then try a smaller --learning_rate, a larger group, a --beta above 0, or a group mean.

    python sign_grpo.py                            the tiny model in tests/tiny: CPU, offline
    python sign_grpo.py --model Qwen/Qwen2.5-3B    GSM8K on one GPU
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from common import (  # before torch, since it sets up torch's memory allocator
    BadInput, Float32AdamW, Run, arg, check_model, check_results, check_rewards, load_policy,
    load_reference, load_splits, next_token_logits, pad_left, readable_golds, run_script,
    stop_token_ids, token_logps_and_entropies, verify)
import torch
from transformers import DynamicCache


@dataclass
class Args:
    # --- model and data ---
    model: str = arg(None, "hub name or folder; None is the tiny model, with its own settings")
    dataset: str = arg("openai/gsm8k:main", "hub name[:configuration], .jsonl file, or folder")
    eval_dataset: str = arg(None, "like --dataset; or gsm8k math500 amc23 minerva aime24 aime25")
    instruction: str = arg(
        "Reason step by step and put the final answer in \\boxed{}.", "appended to every question")
    chat_template_kwargs: str = arg("{}", "JSON object of variables for the chat template")
    output_dir: str = arg(None, "folder for logs and checkpoints; None is runs/<script>")
    resume: bool = arg(False, "continue from the latest complete checkpoint in --output_dir")
    seed: int = arg(0, "random seed", 0)
    device: str = arg(None, "cpu or cuda; None is cuda if available")
    lora_rank: int = arg(0, "rank of the adapters on every linear layer; 0 trains all weights", 0)
    # --- rollout ---
    prompts_per_step: int = arg(8, "P, prompts per step", 1)
    group_size: int = arg(8, "G, responses per prompt", 2)
    max_prompt_tokens: int = arg(512, "longer prompts are dropped, and their number is printed", 1)
    max_new_tokens: int = arg(1024, "C, maximum length of a response", 1)
    temperature: float = arg(1.0, "sampling temperature, also for log-probs in training", 0.01)
    # --- optimization ---
    steps: int = arg(500, "training steps; 0 only evaluates", 0)
    learning_rate: float = arg(1e-6, "AdamW learning rate; with --lora_rank 10 times that", 0.0)
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up", 0)
    max_grad_norm: float = arg(1.0, "gradients are clipped to this norm", 1e-9)
    updates_per_rollout: int = arg(1, "mu, optimizer steps per rollout", 1)
    clip_low: float = arg(0.2, "eps_low: the ratio is clipped below 1 - eps_low", 0.0)
    clip_high: float = arg(0.2, "eps_high: the ratio is clipped above 1 + eps_high", 0.0)
    beta: float = arg(0.0, "weight of the KL penalty; above 0 a reference model is loaded", 0.0)
    micro_batch_tokens: int = arg(16384, "tokens per micro-batch; changes memory, not results", 1)
    gradient_checkpointing: bool = arg(True, "recompute activations: less memory, slower updates")
    # --- evaluation and logging ---
    eval_every: int = arg(50, "steps between evaluations; also before the first, after the last", 1)
    eval_problems: int = arg(200, "number of held-out problems", 1)
    eval_samples: int = arg(4, "responses per held-out problem, for pass@1, 2, 4, ...", 1)
    eval_temperature: float = arg(None, "None is --temperature; 0 is greedy, one response", 0.0)
    save_every: int = arg(100, "steps between checkpoints; also after the last", 1)
    # --- algorithm ---


TINY_DIR = str(Path(__file__).resolve().parent / "tests" / "tiny")
TINY = dict(  # replaces the defaults above when there is no --model
    model=TINY_DIR, dataset=TINY_DIR, instruction="", device="cpu", prompts_per_step=16,
    max_prompt_tokens=32, max_new_tokens=48, steps=50, learning_rate=3e-4, warmup_steps=0,
    gradient_checkpointing=False, eval_every=10, save_every=20)  # fmt: skip


@dataclass
class Batch:
    """P prompts with G responses each: B = P G rows (row i: prompt i // G), T response columns."""

    input_ids: torch.Tensor = None  # (B, S + T) left-padded prompts, then responses
    attention_mask: torch.Tensor = None  # (B, S + T)
    mask: torch.Tensor = None  # (B, T) bool, True up to and including the stop token
    texts: list = None  # B decoded responses
    finished: torch.Tensor = None  # (B,) bool, False where a response was cut off
    # The rest is None until it is computed, and undefined where mask is False.
    sampled_logps: torch.Tensor = None  # (B, T) as computed token by token while sampling
    rewards: torch.Tensor = None  # (P, G)
    old_logps: torch.Tensor = None  # (B, T) under the policy that sampled the tokens
    ref_logps: torch.Tensor = None  # (B, T) under the model that the run started from
    entropies: torch.Tensor = None  # (B, T) of the policy that sampled the tokens


# --- algorithm ---
NEEDS_SCORES = False  # True if compute_advantages reads old_logps, ref_logps or entropies


def compute_advantages(batch, args):
    """How much better than expected each token was, (B, T) float32."""
    rewards = batch.rewards  # (P, G)
    if not ((rewards == 0) | (rewards == 1)).all():
        raise BadInput("rewards must be 0 or 1 for the sign advantage: see compute_reward")
    advantages = 2 * rewards - 1  # (P, G)
    return torch.where(batch.mask, advantages.reshape(-1, 1), 0.0)  # (B, T)


def compute_weights(batch, args):
    """How much each token counts in the loss, (B, T) float32, 0 off the mask."""
    return batch.mask / args.max_new_tokens / len(batch.mask)  # (B, T) the same for every token


# --- the same in all five scripts from here on ---
def compute_reward(text, problem, length):
    """1.0 if the last \\boxed{} of the response equals the answer, else 0.0. Put your own here.

    problem holds every column of the data's row; length counts tokens, the stop token too.
    """
    return verify(text, problem["answer"])


def policy_loss(logps, old_logps, ref_logps, advantages, weights, mask, args):
    """Clipped surrogate plus KL penalty, summed over (b, T) tokens; also metrics for the log.

    W contains every 1 / L and 1 / B, so micro-batch losses add up. Metrics are means over the mask.
    """
    # Mask the inputs, not the loss: 0 * NaN from the padding is NaN in the backward pass.
    logps = logps.where(mask, 0.0)
    old_logps = old_logps.where(mask, 0.0)
    advantages = advantages.where(mask, 0.0)
    ratio = torch.exp((logps - old_logps).clamp(max=20.0))  # e^20 = 5e8, so never infinite
    low, high = 1 - args.clip_low, 1 + args.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    loss = -(weights * surrogate).sum()
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    tokens = mask.sum().clamp(min=1)
    metrics = {"clip_frac": clipped.sum() / tokens}
    if ref_logps is not None:
        log_ratio = (ref_logps.where(mask, 0.0) - logps).clamp(max=20.0)
        k3 = torch.exp(log_ratio) - log_ratio - 1  # its mean is the KL: joschu.net/blog/kl-approx
        loss = loss + args.beta * (weights * k3).sum()
        metrics["kl"] = k3.detach().sum() / tokens
    return loss, metrics


def main(args):
    run = Run(args, __file__)  # the output folder: log, checkpoints, and where --resume continues
    model, tokenizer = load_policy(run.checkpoint or args.model, args)
    train, held_out = load_problems(tokenizer, args)
    check_model(model, train + held_out, args)
    optimizer = run.restore(Float32AdamW(model, args))
    reference = None
    if args.beta > 0 or NEEDS_SCORES:
        reference = load_reference(model, args)

    if run.step == 0 or args.steps == 0:
        run.log(run.step, evaluate(model, tokenizer, held_out, args, run))
    for step in run.steps():
        # 1. Sample G responses to each of P prompts, and reward them.
        places = run.places(step)  # positions of P prompts in the run, or this process' share
        problems = problems_at(train, places, args)
        streams = [random_stream(args.seed, "draws", place) for place in places]
        batch = rollout(model, tokenizer, problems, args.group_size, args, streams)
        batch.rewards = grade(batch, problems)  # (P, G)
        run.tick("rollout")

        # 2. Turn the rewards into an advantage and a weight for every token.
        if NEEDS_SCORES:
            batch.old_logps, batch.entropies = score(model, batch, args)
        if reference is not None:
            batch.ref_logps, _ = score(reference, batch, args)
        advantages = compute_advantages(batch, args)  # (B, T)
        weights = compute_weights(batch, args)  # (B, T)

        # 3. Update the policy.
        sums = update(model, optimizer, batch, advantages, weights, step, args)
        run.tick("update")

        # 4. Log, evaluate, save.
        last = step == args.steps
        run.log(step, summarize(batch, sums, step, args, run), example=(problems[0], batch))
        if step % args.eval_every == 0 or last:
            run.log(step, evaluate(model, tokenizer, held_out, args, run))
        if step % args.save_every == 0 or last:
            run.save(step, model, tokenizer, optimizer)


# --- machinery ---
def learning_rate(step, args):
    """Linear warm-up, then constant."""
    return args.learning_rate * min(1.0, step / max(1, args.warmup_steps))


def update(model, optimizer, batch, advantages, weights, step, args):
    """mu optimizer steps on one rollout; returns means over them: loss, grad_norm, token sums."""
    check_results(advantages, weights, batch.mask)
    torch.cuda.empty_cache()  # the rollout's cache grew in many small pieces; no-op without a GPU
    sums = Counter()
    if not NEEDS_SCORES:
        batch.old_logps = torch.zeros_like(batch.sampled_logps)
        batch.entropies = torch.zeros_like(batch.sampled_logps)
    for i in range(args.updates_per_rollout):
        for rows, columns, logps, entropies in micro_batches(model, batch, args):
            if i == 0:  # the policy has not moved since sampling: these are the old log-probs
                batch.old_logps[rows, columns] = logps.detach()
                batch.entropies[rows, columns] = entropies
            ref_logps = None
            if batch.ref_logps is not None:
                ref_logps = batch.ref_logps[rows, columns]
            mask = batch.mask[rows, columns]
            loss, metrics = policy_loss(
                logps, batch.old_logps[rows, columns], ref_logps, advantages[rows, columns],
                weights[rows, columns], mask, args)
            loss.backward()
            sums["loss"] += loss.item()
            for name, value in metrics.items():
                sums[name] += (value * mask.sum()).item()
        # No advantage, no step, not even for the KL: momentum alone must not move the weights.
        sums["grad_norm"] += optimizer.step(learning_rate(step, args), skip=not advantages.any())
    for name in sums:
        sums[name] /= args.updates_per_rollout
    return sums


def sample(logits, uniforms, temperature):
    """One token per row from softmax(logits / temperature), and its log-prob: (b,) and (b,).

    By inverting the CDF: faster than torch.multinomial on CPU, and a row's token depends on its
    own uniform number alone. Temperature 0 takes the most likely token. The logits are overwritten:
    new buffers of their size would cost a fifth of a rollout on CPU.
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(uniforms)
    probs = logits.div_(temperature).softmax(-1)  # (b, V)
    cdf = torch.cumsum(probs, -1, out=logits)
    target = uniforms[:, None] * (1 - 2**-23) * cdf[:, -1:]  # stays below the last entry
    # right=True takes the first entry above the target: a token of probability 0 is never drawn.
    tokens = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)  # (b, 1)
    return tokens[:, 0], probs.gather(1, tokens).log()[:, 0]


@torch.no_grad()
def rollout(model, tokenizer, problems, samples, args, streams):
    """Sample responses to each problem from its own random stream: a Batch without rewards.

    A plain loop instead of model.generate: each prompt is read once for all its samples, finished
    rows leave the batch, and nothing of the model's generation_config (top-k, ...) leaks in.
    """
    model.eval()
    device = model.device
    stop = torch.tensor(stop_token_ids(model, tokenizer, args), device=device)
    ids, attention_mask = pad_left(problems, tokenizer.pad_token_id, device)  # (P, S) each
    cache = DynamicCache(config=model.config)
    logits = next_token_logits(model, ids, attention_mask, cache)  # (P, V)
    owner = torch.arange(len(problems), device=device).repeat_interleave(samples)  # (B,)
    cache.reorder_cache(owner)  # not batch_repeat_interleave, which is wrong for hybrid models
    logits = logits[owner]
    ids = ids[owner]
    attention_mask = attention_mask[owner]

    # All random numbers first: a row's tokens do not depend on when the others end.
    uniforms = [torch.rand(samples, args.max_new_tokens, generator=stream) for stream in streams]
    uniforms = torch.cat(uniforms).to(device)  # (B, C)
    responses = torch.full(uniforms.shape, tokenizer.pad_token_id, device=device)
    logps = torch.zeros_like(uniforms)
    active = torch.arange(len(owner), device=device)  # the rows that are still being written
    active_mask = attention_mask
    for t in range(args.max_new_tokens):
        tokens, logps[active, t] = sample(logits, uniforms[active, t], args.temperature)
        responses[active, t] = tokens
        keep = (~torch.isin(tokens, stop)).nonzero()[:, 0]  # waits for the GPU, once per token
        if len(keep) == 0:
            break
        if len(keep) < len(active):
            active = active[keep]
            active_mask = active_mask[keep]
            tokens = tokens[keep]
            cache.reorder_cache(keep)
        active_mask = torch.cat([active_mask, active_mask.new_ones(len(active), 1)], 1)
        if t + 1 < args.max_new_tokens:
            logits = next_token_logits(model, tokens[:, None], active_mask, cache)
    responses = responses[:, : t + 1]
    return finish(tokenizer, ids, attention_mask, responses, logps[:, : t + 1], stop)


def finish(tokenizer, ids, attention_mask, responses, logps, stop):
    """The Batch of a rollout."""
    stops = torch.isin(responses, stop)  # (B, T)
    # By position, up to the first stop token: pad may be one too, and prompts may contain it.
    mask = stops.cumsum(1) - stops.long() == 0
    return Batch(
        input_ids=torch.cat([ids, responses], 1),
        attention_mask=torch.cat([attention_mask, mask.long()], 1),
        mask=mask,
        texts=[tokenizer.decode(r[m], skip_special_tokens=True) for r, m in zip(responses, mask)],
        finished=stops.any(1),
        sampled_logps=logps,
    )


def grade(batch, problems):
    """compute_reward of every response, (P, G) float32."""
    samples = len(batch.texts) // len(problems)
    lengths = batch.mask.sum(1).tolist()
    rewards = []
    for i, text in enumerate(batch.texts):
        rewards.append(compute_reward(text, problems[i // samples], lengths[i]))
    check_rewards(rewards)
    rewards = torch.tensor(rewards, dtype=torch.float32, device=batch.mask.device)
    return rewards.view(len(problems), samples)


def micro_batches(model, batch, args):
    """Yield (rows, columns, logps, entropies): longest responses first, trimmed to what they use.

    logps and entropies are (b, T') and belong to batch.mask[rows, columns].
    """
    model.train()  # switches gradient checkpointing on and nothing else: dropout is 0
    lengths = batch.mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    prompt_columns = batch.input_ids.shape[1] - batch.mask.shape[1]
    while len(order) > 0:
        T = int(lengths[order[0]])
        count = max(1, args.micro_batch_tokens // (prompt_columns + T))
        rows = order[:count]
        order = order[count:]
        attention_mask = batch.attention_mask[rows, : prompt_columns + T]
        used = attention_mask.any(0)
        ids = batch.input_ids[rows, : prompt_columns + T][:, used]
        yield rows, slice(T), *token_logps_and_entropies(
            model, ids, attention_mask[:, used], T, args.temperature)


@torch.no_grad()
def score(model, batch, args):
    """Log-probs and entropies under a model, (B, T) each.

    In the micro-batches of the update: the same products in the same order, hence the same bits.
    """
    all_logps = torch.zeros(batch.mask.shape, device=batch.mask.device)
    all_entropies = torch.zeros_like(all_logps)
    for rows, columns, logps, entropies in micro_batches(model, batch, args):
        all_logps[rows, columns] = logps
        all_entropies[rows, columns] = entropies
    return all_logps, all_entropies


def pass_at_k(n, c, k):
    """Unbiased estimate of pass@k when c of n responses are right (arXiv:2107.03374)."""
    if k > n:
        raise ValueError(f"pass@{k} takes at least {k} samples, not {n}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(model, tokenizer, problems, args, run):
    """Accuracy and pass@k on held-out problems, always with the same random numbers."""
    if not problems:
        return {}
    if args.eval_temperature is not None:
        args = replace(args, temperature=args.eval_temperature)
    n = args.eval_samples if args.temperature > 0 else 1
    samples = min(n, run.eval_rows)
    numbers = run.share(range(len(problems)))
    streams = [random_stream(args.seed, "evaluation", i) for i in numbers]
    problems = run.share(problems)
    size = run.eval_rows // samples
    for start in range(0, len(problems), size):
        chunk = slice(start, start + size)
        for done in range(0, n, samples):  # once, unless --eval_samples exceeds the rows
            count = min(samples, n - done)
            batch = rollout(model, tokenizer, problems[chunk], count, args, streams[chunk])
            run.add_samples(problems[chunk], batch, grade(batch, problems[chunk]))
    rewards = run.save_samples()  # one list of n for each problem, from all processes
    right = [sum(reward >= 1 for reward in group) for group in rewards]
    metrics = {"eval_accuracy": fmean(right) / n, "eval_reward": fmean(map(fmean, rewards))}
    for k in [2**i for i in range(n.bit_length())]:  # 1, 2, 4, ... up to n
        metrics[f"eval_pass@{k}"] = fmean(pass_at_k(n, c, k) for c in right)
    return metrics


def summarize(batch, sums, step, args, run):
    """The metrics of one step: means over the prompts, responses or tokens of all processes."""
    rewards = batch.rewards  # (P, G)
    tokens = batch.mask.sum().item()
    difference = (batch.sampled_logps - batch.old_logps).abs()  # (B, T)
    means = run.means({
        "reward": rewards,
        "degenerate_frac": rewards.amax(1) == rewards.amin(1),
        "degenerate_iid": (rewards == 0) | (rewards == 1),  # replaced below
        "completion_len": batch.mask.sum(1),
        "truncated_frac": ~batch.finished,
        "entropy": batch.entropies[batch.mask],
        "sampling_logp_diff": difference[batch.mask],
        "loss": sums.pop("loss"),
    })
    p = means["reward"]
    iid = p**args.group_size + (1 - p) ** args.group_size
    means["degenerate_iid"] = iid if means["degenerate_iid"] == 1 else None
    return {
        **means,
        "grad_norm": sums.pop("grad_norm"),
        "clip_frac": None,  # these two keep their place where policy_loss returns none
        "kl": None,
        **run.token_means(sums, tokens),  # what policy_loss returned
        "learning_rate": learning_rate(step, args),
        "tokens": run.total(tokens),
    }


def load_problems(tokenizer, args):
    """Training and held-out problems: rows of the data, each with its "prompt_ids"."""
    train, held_out = load_splits(tokenizer, args)
    # If compute_reward no longer calls verify, delete these two lines.
    train = readable_golds(train, args.dataset, args.prompts_per_step)
    held_out = readable_golds(held_out, args.eval_dataset or args.dataset)
    return train, held_out[: args.eval_problems]


def problems_at(problems, places, args):
    """The problems at these places of the run: every epoch is a new permutation of them all."""
    chosen = []
    for place in places:
        epoch, i = divmod(place, len(problems))
        order = torch.randperm(len(problems), generator=random_stream(args.seed, "order", epoch))
        chosen.append(problems[order[i]])
    return chosen


def random_stream(seed, purpose, number):
    """A generator for one purpose: the same after a resume, and unaffected by other draws."""
    # Hashed, because torch's CPU generator uses only the low 32 bits of a seed.
    key = random.Random(f"{seed} {purpose} {number}").getrandbits(32)
    return torch.Generator().manual_seed(key)


if __name__ == "__main__":
    run_script(main, Args, TINY)
