"""EP-GRPO, entropy-progress aligned GRPO: the reference loop of grpo.py with an advantage of its own for every token.

GRPO credits all tokens of a response alike, and is silent where a group's rewards are equal. EP-GRPO adds

    gate        W^gate = sigmoid(gamma (H - mu_H) / sigma_H)    tokens where the policy was undecided count more
    signal      Delta = log pi - log pi_ref                     what training has made more likely, token by token
    progress    tau_t = S_t / S_L, S the running sum of H       how far along a response is, cut into K buckets
    z           (Delta - mu_b) / sigma_b                        among the tokens of the same group and bucket
    anchor      d_i = sign(A_i), or sign(r_i - theta) in a group of equal rewards
    advantage   A_it = W^gate_it A_i + lambda d_i z_it          A_i as in grpo.py, H the entropy of the next token
    weight      W_it = mask_it / L_i / B                        as in grpo.py

Paper: EP-GRPO (arXiv:2605.04960); departures from it are numbered at their lines. Costs one scoring pass of policy and
reference a step, and the reference in memory. Differs from grpo.py in compute_advantages and six flags;
--no_entropy_gate --progress_weight 0 --no_zero_variance_anchor together are grpo.py, each alone is an ablation. At the
first step policy and reference agree: the progress term is exactly 0. How it fails: z has unit spread whatever the
drift, once that exceeds 1e-3: it amplifies noise in groups without variance. A small --progress_weight keeps it in
bounds.

    python ep_grpo.py                               the tiny model in tests/tiny: CPU, offline, under two minutes
    python ep_grpo.py --model Qwen/Qwen2.5-3B       GSM8K on one 80 GB GPU

The algorithm is the two functions under the second "# --- algorithm ---".
"""

import json
import random
import sys
import time
import warnings
from dataclasses import dataclass, field
from math import comb, isfinite
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache, HfArgumentParser

from common import BadInput, check_model, copy_masters, encode_prompt, float32_masters, load_model, load_rows, open_run
from common import recompute_activations, restore, save_checkpoint, stop_token_ids, token_logps_and_entropies
from common import verify, verify_timeouts


def arg(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    # --- model and data ---
    model: str = arg(None, "hub name or local folder; without it the tiny model in tests/tiny and its own recipe")
    dataset: str = arg("openai/gsm8k", "hub name, .jsonl file, or folder with train.jsonl and test.jsonl")
    dataset_config: str = arg("main", "configuration of a hub dataset")
    eval_dataset: str = arg(None, "as --dataset, or a benchmark: gsm8k math500 amc23 minerva aime24 aime25")
    instruction: str = arg("Reason step by step and put the final answer in \\boxed{}.", "follows each question")
    output_dir: str = arg(None, "folder of the run; without it runs/<script>")
    resume: bool = arg(False, "go on from the newest whole checkpoint in the output folder")
    seed: int = arg(0, "every sample follows from (seed, step), the data order from (seed, epoch)")
    device: str = arg(None, "cpu or cuda; without it cuda where there is one")
    # --- rollout ---
    prompts_per_step: int = arg(8, "P, prompts a step")
    group_size: int = arg(8, "G, responses a prompt")
    max_prompt_tokens: int = arg(512, "longer prompts are dropped, and counted")
    max_new_tokens: int = arg(1024, "C, where a response is cut off")
    temperature: float = arg(1.0, "of sampling, and of every log-prob that is trained on")
    # --- optimisation ---
    steps: int = arg(500, "rollouts to train on; 0 evaluates only")
    learning_rate: float = arg(1e-6, "of AdamW, constant after the warm-up")
    warmup_steps: int = arg(10, "steps of linear warm-up")
    weight_decay: float = arg(0.0, "of AdamW")
    max_grad_norm: float = arg(1.0, "a longer gradient is scaled down to this norm")
    updates_per_rollout: int = arg(1, "mu, optimizer steps on one rollout; the ratio leaves 1 from the second on")
    clip_low: float = arg(0.2, "eps_low: the ratio is clipped below 1 - eps_low")
    clip_high: float = arg(0.2, "eps_high: the ratio is clipped above 1 + eps_high")
    beta: float = arg(0.0, "weight of the KL to the model the run began with; above 0 that model stays in memory")
    micro_batch_tokens: int = arg(16384, "rows x columns of one forward and backward: memory, not mathematics")
    gradient_checkpointing: bool = arg(True, "activations recomputed: less memory, about a third more update time")
    # --- evaluation and logging ---
    eval_every: int = arg(50, "steps between evaluations; one before the first step and one after the last come anyway")
    eval_problems: int = arg(200, "held-out problems in an evaluation")
    eval_samples: int = arg(4, "responses a problem: pass@k for k = 1, 2, 4, ... up to this")
    log_completions_every: int = arg(10, "steps between printed completions")
    save_every: int = arg(100, "steps between checkpoints; the last step is saved anyway")
    # --- algorithm ---
    gate_sharpness: float = arg(1.0, "gamma of the entropy gate: 0 weighs all tokens by one half")
    buckets: int = arg(10, "K, stages of progress that tokens are compared within")
    progress_weight: float = arg(0.1, "lambda of the progress term; 0 switches it off")
    reward_threshold: float = arg(0.5, "theta: above it a group of equal rewards counts as right")
    entropy_gate: bool = arg(True, "the outcome advantage is weighed by entropy")
    zero_variance_anchor: bool = arg(True, "groups of equal rewards have the progress term too")
    min_group_size = 2  # without a type, so not a flag: a response alone in its group is its own mean
    scores_first = True  # not a flag either: compute_advantages needs old_logps, ref_logps and entropies


TINY_DIR = str(Path(__file__).resolve().parent / "tests" / "tiny")
TINY = dict(  # the recipe of the offline default; the defaults above are for a real model on a GPU
    model=TINY_DIR, dataset=TINY_DIR, instruction="", device="cpu", prompts_per_step=16, max_prompt_tokens=32,
    max_new_tokens=48, steps=50, learning_rate=3e-4, warmup_steps=0, gradient_checkpointing=False, eval_every=10,
    log_completions_every=20, save_every=20)  # fmt: skip


@dataclass
class Batch:
    """One step's rollout: P prompts, G responses each, B = P G rows (row i of prompt i // G), T completion columns."""

    rewards: torch.Tensor  # (P, G) float32
    mask: torch.Tensor  # (B, T) bool, through the first stop token; where it is false the fields below hold anything
    input_ids: torch.Tensor = None  # (B, S + T) left-padded prompts, then responses
    attention_mask: torch.Tensor = None  # (B, S + T)
    old_logps: torch.Tensor = None  # (B, T) float32, under the policy that drew the tokens
    ref_logps: torch.Tensor = None  # (B, T) float32, under the model that the run began with
    entropies: torch.Tensor = None  # (B, T) float32, of the policy that drew the tokens, at the sampling temperature


# --- algorithm ---
def compute_advantages(batch, args):
    """How much better than expected each token was, (B, T) float32."""
    rewards = batch.rewards  # (P, G)
    if rewards.shape[1] < 2 or not rewards.isfinite().all():
        raise ValueError("rewards must be finite, in groups of at least two")
    centred = rewards - rewards.mean(1, keepdim=True)  # (P, G)
    # Equal rewards carry no signal. Compare them: the float std of twelve times 0.1 is not 0.
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # (P, 1)
    outcome = torch.where(equal, 0.0, centred / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)  # (B, 1)

    # (1) All statistics are of the policy that drew the rollout, detached: the paper's pi_theta moves with the update.
    # float64, since equal entropies must give a sigma of 0 and equal steps must fall into the same bucket.
    mask = batch.mask
    entropies = torch.where(mask, batch.entropies, 0.0).double()  # (B, T)
    group = torch.arange(len(mask), device=mask.device)[:, None] // rewards.shape[1]  # (B, 1)

    def mean_within(cell, x):  # of the unmasked tokens of each cell, handed back to each of its tokens, (B, T)
        cell, sums = cell.expand(mask.shape), x.new_zeros(2, len(rewards) * args.buckets)
        sums[0].index_add_(0, cell.flatten(), torch.where(mask, x, 0.0).flatten())
        sums[1].index_add_(0, cell.flatten(), mask.double().flatten())
        return (sums[0] / sums[1].clamp(min=1))[cell]

    excess = entropies - mean_within(group, entropies)
    spread = mean_within(group, excess.square()).sqrt()  # (2) the sigmas are population ones, ddof 0
    gate = torch.sigmoid(args.gate_sharpness * excess / (spread + 1e-6)) if args.entropy_gate else 1.0  # (B, T)

    # (3) The progress coordinate counts the token's own entropy; a response without any entropy stays in bucket 0.
    running = entropies.cumsum(1)  # (B, T)
    progress = torch.where(running[:, -1:] > 0, running / running[:, -1:], 0.0)  # (B, T) tau, up to 1 at the end
    bucket = (args.buckets * progress).floor().clamp(0, args.buckets - 1).long()  # (B, T)
    cell = group * args.buckets + bucket  # (B, T) of P K cells

    delta = (batch.old_logps - batch.ref_logps).double()  # (B, T)
    apart = delta - mean_within(cell, delta)
    z = apart / (mean_within(cell, apart.square()).sqrt() + 1e-3)  # (4) 1e-3: what hardly moved is not blown up
    fallback = torch.sign(rewards - args.reward_threshold) if args.zero_variance_anchor else 0.0
    anchor = torch.where(equal, fallback, centred.sign()).reshape(-1, 1)  # (B, 1)
    # (5) lambda stands outside the z-score, which would divide the paper's s = lambda Delta by lambda again.
    return torch.where(mask, gate * outcome + args.progress_weight * anchor * z, 0.0).float()  # (B, T)


def compute_weights(batch, args):
    """What each token counts in the loss, (B, T) float32, 0 off the mask."""
    lengths = batch.mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    return batch.mask / lengths / len(batch.mask)  # (B, T), a mean over each response, then over the batch


# --- the same in all five scripts, from here to the end ---
def policy_loss(logps, old_logps, ref_logps, advantages, weights, args):
    """Clipped surrogate plus KL penalty over (b, T) tokens: the loss and {"clip_frac", "kl"}, means over the unmasked.

    ref_logps may be None; W = 0 marks a masked token. A sum, not a mean: W holds every 1 / L and 1 / B, so the losses
    of micro-batches add up to the batch's."""
    def exp(x):  # finite, at most e^20 = 5e8, or an infinite ratio would make a clipped token's gradient 0 * inf
        return torch.exp(x - (x - 20.0).clamp(min=0.0).detach())

    mask = weights != 0
    # Select before the arithmetic: a NaN under the mask would come back as 0 * NaN in the backward of exp.
    logps, old_logps, advantages = (torch.where(mask, x, 0.0) for x in (logps, old_logps, advantages))
    ratio, low, high = exp(logps - old_logps), 1 - args.clip_low, 1 + args.clip_high
    loss = -(weights * torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)).sum()
    bound = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    metrics = {"clip_frac": bound.sum() / mask.sum().clamp(min=1)}
    if ref_logps is not None:
        log_ratio = torch.where(mask, ref_logps, 0.0) - logps
        k3 = exp(log_ratio) - log_ratio - 1  # at least 0, its mean is the KL: joschu.net/blog/kl-approx
        loss = loss + args.beta * (weights * k3).sum()
        metrics["kl"] = k3.detach().sum() / mask.sum().clamp(min=1)
    return loss, metrics


def load_problems(source, config, split, tokenizer, args):
    """[{"question", "answer", "prompt_ids"}, ...]; BadInput for what cannot be used; over-long prompts are dropped."""
    rows, problems = load_rows(source, config, split), []
    for question, answer in rows:
        prompt_ids = encode_prompt(tokenizer, f"{question}\n{args.instruction}".strip())
        if len(prompt_ids) <= args.max_prompt_tokens:
            problems.append({"question": question, "answer": answer, "prompt_ids": prompt_ids})
    if len(problems) < len(rows):
        print(f"{source}: dropped {len(rows) - len(problems)} of {len(rows)} prompts, longer than --max_prompt_tokens")
    return problems


def random_stream(seed, purpose, number):
    """A generator of its own for each (seed, purpose, number): a resume finds it again, no other draw can move it."""
    key = random.Random(f"{seed} {purpose} {number}").getrandbits(32)  # hashed: torch uses a seed's low 32 bits only
    return torch.Generator().manual_seed(key)


@torch.no_grad()
def rollout(model, tokenizer, prompts, samples, args, generator):
    """Draw `samples` responses to each prompt (a list of ids), every token from softmax(logits / temperature).

    A plain loop, not `generate`: a prompt is read once for all its samples, ended rows leave the batch, and nothing of
    the model's generation_config (top-k, penalties, ...) leaks in. Returns input_ids and attention_mask (B, S + T),
    mask (B, T), finished (B,), true where a stop token was drawn, and the B texts."""
    device, pad = model.device, tokenizer.pad_token_id
    stop = torch.tensor(stop_token_ids(model, tokenizer), device=device)
    S, B, C = max(map(len, prompts)), len(prompts) * samples, args.max_new_tokens
    prompt_ids = torch.tensor([[pad] * (S - len(ids)) + ids for ids in prompts], device=device)  # (P, S)
    prompt_mask = torch.tensor([[0] * (S - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    forward, cache = torch.inference_mode()(model), DynamicCache(config=model.config)  # no_grad, and a little faster
    logits = forward(prompt_ids, attention_mask=prompt_mask, position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0),
                     cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.reorder_cache(torch.arange(B, device=device) // samples)  # a copy of its prompt's cache for each sample
    logits, prompt_ids, prompt_mask = (x.repeat_interleave(samples, 0) for x in (logits, prompt_ids, prompt_mask))

    # All randomness at once: what a row draws does not depend on when others end. The factor keeps u * total below the
    # total after rounding, or the vocabulary's last token could be drawn at probability 0.
    uniforms = torch.rand(B, C, generator=generator).mul(1 - 2**-23).to(device)
    completions = torch.full((B, C), pad, device=device)
    lengths, finished = torch.full((B,), C, device=device), torch.zeros(B, dtype=torch.bool, device=device)
    live, live_mask = torch.arange(B, device=device), prompt_mask  # the rows still being written
    for t in range(C):
        # Inverse CDF: on CPU an eighth of torch.multinomial's time, and each probability right to about 1e-7. `right`
        # takes the first entry above u: a token of probability 0 is never drawn.
        cdf = (logits.float() / args.temperature).softmax(-1).cumsum_(-1)  # (b, V)
        tokens = torch.searchsorted(cdf, uniforms[live, t, None] * cdf[:, -1:], right=True).clamp(max=cdf.shape[1] - 1)
        completions[live, t] = tokens[:, 0]
        ended = torch.isin(tokens[:, 0], stop)
        if ended.any():  # on a GPU this waits for the device, once a token
            lengths[live[ended]], finished[live[ended]] = t + 1, True
            going = (~ended).nonzero()[:, 0]
            live, live_mask, tokens = live[going], live_mask[going], tokens[going]
            cache.reorder_cache(going)
        if t + 1 == C or not len(live):
            break
        live_mask = torch.cat([live_mask, live_mask.new_ones(len(live), 1)], 1)
        logits = forward(tokens, attention_mask=live_mask, position_ids=live_mask.sum(1, keepdim=True) - 1, cache=cache,
                         use_cache=True).logits[:, -1]
    completions = completions[:, : lengths.max()]  # (B, T)
    mask = torch.arange(completions.shape[1], device=device) < lengths[:, None]  # by position: pad may be a stop id too
    texts = [tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(completions, mask)]
    return torch.cat([prompt_ids, completions], 1), torch.cat([prompt_mask, mask.long()], 1), mask, finished, texts


def micro_batches(model, batch, args):
    """Yield (rows, logps, entropies), (b,) and (b, T'): longest responses first, as many rows as --micro_batch_tokens
    admits (one at least), trimmed to the columns that they use, T' the longest response."""
    lengths = batch.mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        T = int(lengths[order[0]])
        columns = batch.input_ids.shape[1] - batch.mask.shape[1] + T
        rows, order = order.tensor_split([max(1, args.micro_batch_tokens // columns)])
        used = batch.attention_mask[rows].any(0)
        ids, attention_mask = batch.input_ids[rows][:, used], batch.attention_mask[rows][:, used]
        yield rows, *token_logps_and_entropies(model, ids, attention_mask, T, args.temperature)


@torch.no_grad()
def score(model, batch, args):
    """Log-probs and entropies (B, T), in the micro-batches of the update: the same cut rounds in the same way."""
    scores = torch.zeros(2, *batch.mask.shape, device=batch.mask.device)
    for rows, logps, entropies in micro_batches(model, batch, args):
        scores[:, rows, : logps.shape[1]] = torch.stack([logps, entropies])
    return scores


def pass_at_k(n, c, k):
    """Unbiased chance that one of k responses is right when c of n were. Codex (arXiv:2107.03374), equation 1."""
    if k > n:
        raise ValueError(f"pass@{k} takes at least {k} samples, not {n}")
    return 1 - comb(n - c, k) / comb(n, k)


def evaluate(model, tokenizer, problems, args, path):
    """Accuracy and pass@k on held-out problems, always with the same draws; samples and verdicts go to a file."""
    draws, n, correct = random_stream(args.seed, "evaluation", 0), args.eval_samples, []
    chunk = max(1, args.prompts_per_step * args.group_size // n)  # no more rows at once than in training
    with open(path, "w", encoding="utf-8") as file:
        for some in (problems[i : i + chunk] for i in range(0, len(problems), chunk)):
            *_, texts = rollout(model, tokenizer, [problem["prompt_ids"] for problem in some], n, args, draws)
            for problem in some:
                samples, texts = texts[:n], texts[n:]
                verdicts = [verify(text, problem["answer"]) for text in samples]
                correct.append(int(sum(verdicts)))
                line = {"question": problem["question"], "answer": problem["answer"]}
                file.write(json.dumps(line | {"samples": samples, "verdicts": verdicts}) + "\n")
    metrics = {"eval_accuracy": sum(correct) / (n * len(correct))}
    for k in (2**i for i in range(n.bit_length())):  # 1, 2, 4, ... up to n
        metrics[f"eval_pass@{k}"] = sum(pass_at_k(n, c, k) for c in correct) / len(correct)
    return metrics


def main(args):
    folder = Path(args.output_dir or f"runs/{Path(__file__).stem}")
    log, checkpoint, start, state = open_run(folder, __file__, args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(checkpoint or args.model, device)
    if args.gradient_checkpointing:
        recompute_activations(model)

    problems, held_out = [], []
    if args.steps:
        problems = load_problems(args.dataset, args.dataset_config, "train", tokenizer, args)
        if len(problems) < args.prompts_per_step:
            raise BadInput(f"{args.dataset}: {len(problems)} usable prompts, fewer than --prompts_per_step")
    if args.eval_dataset or not args.dataset.endswith(".jsonl"):
        source, config = (args.eval_dataset, None) if args.eval_dataset else (args.dataset, args.dataset_config)
        held_out = load_problems(source, config, "test", tokenizer, args)
        del held_out[args.eval_problems :]
    if not held_out:
        print("no held-out problems, so no evaluation: --eval_dataset names some")
    check_model(model, problems + held_out, args)

    masters = float32_masters(model)
    optimizer = torch.optim.AdamW(masters, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    restore(state, masters, optimizer)
    # The model that the run began with, also after a resume: not the checkpoint.
    reference = load_model(args.model, device, trainable=False)[0] if args.beta or args.scores_first else None

    refused = silent = 0  # updates in a row without a finite gradient, steps in a row without a signal
    bar = tqdm(range(start + 1, args.steps + 1), initial=start, total=args.steps, desc=folder.name)

    def run_evaluation(step):
        metrics = evaluate(model, tokenizer, held_out, args, folder / f"eval-{step}.jsonl")
        log.write(json.dumps({"step": step, **metrics}) + "\n")
        bar.write(f"step {step}: " + "  ".join(f"{key} {value:.3f}" for key, value in metrics.items()))

    if held_out and (start == 0 or args.steps == 0):
        run_evaluation(start)

    for step in bar:
        # --- rollout ---
        clock = time.perf_counter()
        some = []  # epochs follow one another without a gap, each in an order of its own
        for place in range((step - 1) * args.prompts_per_step, step * args.prompts_per_step):
            epoch, i = divmod(place, len(problems))
            order = torch.randperm(len(problems), generator=random_stream(args.seed, "order", epoch))
            some.append(problems[order[i]])
        prompts, draws = [problem["prompt_ids"] for problem in some], random_stream(args.seed, "draws", step)
        ids, attention_mask, mask, finished, texts = rollout(model, tokenizer, prompts, args.group_size, args, draws)
        answers = [problem["answer"] for problem in some for _ in range(args.group_size)]
        rewards = [verify(text, answer) for text, answer in zip(texts, answers)]  # or a reward function of your own
        rewards = torch.tensor(rewards, dtype=torch.float32, device=device)  # (B,)
        batch = Batch(rewards.view(-1, args.group_size), mask, ids, attention_mask)
        seconds_rollout, clock = time.perf_counter() - clock, time.perf_counter()

        # --- advantages ---
        batch.old_logps, batch.entropies = torch.zeros(2, *mask.shape, device=device)  # the first update fills them in
        if args.scores_first:
            batch.old_logps, batch.entropies = score(model, batch, args)
        if reference:
            batch.ref_logps, _ = score(reference, batch, args)
        advantages, weights = compute_advantages(batch, args), compute_weights(batch, args)  # (B, T) each

        # --- update ---
        learning_rate = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
        optimizer.param_groups[0] |= {"lr": learning_rate, "weight_decay": args.weight_decay}  # also after a resume
        sums = dict.fromkeys(("loss", "grad_norm", "clip_frac", "kl"), 0.0)
        for update in range(args.updates_per_rollout):
            for rows, logps, entropies in micro_batches(model, batch, args):
                part = rows, slice(logps.shape[1])  # [part] takes what belongs to logps (b, T') out of a (B, T) tensor
                if update == 0:  # the weights are still those that drew the tokens: no pass of its own for old_logps
                    batch.old_logps[part], batch.entropies[part] = logps.detach(), entropies
                old_logps, ref_logps = batch.old_logps[part], batch.ref_logps[part] if reference else None
                loss, metrics = policy_loss(logps, old_logps, ref_logps, advantages[part], weights[part], args)
                loss.backward()
                sums["loss"] += loss.item()
                for key, value in metrics.items():
                    sums[key] += (value * mask[rows].sum() / mask.sum()).item()
            grad_norm = torch.nn.utils.clip_grad_norm_(masters, args.max_grad_norm).item()
            sums["grad_norm"] += grad_norm
            refused = 0 if isfinite(grad_norm + sums["loss"]) else refused + 1
            if refused:
                bar.write(f"step {step}: the gradient is not finite, the update is refused ({refused} in a row)")
            elif advantages.any():  # else Adam's momentum would move the weights on no signal
                optimizer.step()
                copy_masters(masters, model)
            optimizer.zero_grad()

        # --- log, evaluate, save ---
        p, entropy = rewards.mean().item(), batch.entropies[mask].mean().item()
        equal = batch.rewards.amax(1) == batch.rewards.amin(1)
        means = {key: value / args.updates_per_rollout if isfinite(value) else None for key, value in sums.items()}
        record = {
            "step": step, "reward": p, "degenerate_frac": equal.float().mean().item(),
            "degenerate_iid": p**args.group_size + (1 - p) ** args.group_size,
            "completion_len": mask.sum(1).float().mean().item(), "truncated_frac": 1 - finished.float().mean().item(),
            "entropy": entropy if isfinite(entropy) else None, "loss": means["loss"], "grad_norm": means["grad_norm"],
            "clip_frac": means["clip_frac"], "kl": means["kl"] if reference else None,
            "learning_rate": learning_rate, "tokens": mask.sum().item(),
            "seconds_rollout": seconds_rollout, "seconds_update": time.perf_counter() - clock,
        }
        log.write(json.dumps(record) + "\n")
        bar.set_postfix({key: record[key] for key in ("reward", "completion_len", "entropy", "degenerate_frac")})
        if (step - 1) % args.log_completions_every == 0:
            bar.write(f"step {step}, reward {rewards[0]:.0f}: {some[0]['question']} | {texts[0]}")
        silent = 0 if advantages.any() else silent + 1
        if not finished.any():
            warnings.warn("every response was cut off before its end: raise --max_new_tokens")
        if silent == 20 or silent and step == args.steps:
            warnings.warn(f"{silent} steps of groups all right or all wrong: try other problems or --group_size")
        if verify_timeouts():
            warnings.warn("an answer took the verifier too long and counted as wrong")
        if refused >= 3:
            raise BadInput("three gradients in a row were not finite: lower --learning_rate, then --resume")
        if held_out and (step % args.eval_every == 0 or step == args.steps):
            run_evaluation(step)
        if step % args.save_every == 0 or step == args.steps:
            save_checkpoint(folder, step, model, tokenizer, masters, optimizer)
    print(f"{folder}: metrics.jsonl, eval-*.jsonl, checkpoint-*. Next: go on with --resume --steps N, evaluate the "
          "newest checkpoint with --resume --steps 0, or diff this script with its neighbours")


def parse_args(argv=None):
    """Args from the command line; without --model the tiny recipe replaces the defaults. A given flag always wins."""
    parser = HfArgumentParser(Args, allow_abbrev=False, usage="%(prog)s [--flag value ...]   (--help lists the flags)",
                             description="Without --model the defaults are those of TINY in this script.")
    if parser.parse_known_args(argv)[0].model is None:
        parser.set_defaults(**TINY)
    return Args(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    try:
        main(parse_args())
    except (BadInput, OSError) as error:  # OSError: a full disk, for one
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
