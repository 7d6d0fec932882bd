"""The two functions of each script and the loss they share: against slow float64 loops, against TRL, fault by fault.

The number in a test's name counts the faults that users of such trainers report: what went wrong elsewhere stands here.
"""

import ast
import io
import itertools
import json
import math
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
import torch

import dr_grpo
import ep_grpo
import grpo
import length_alpha
import sign_grpo
from common import BadInput

ROOT = Path(__file__).parent.parent
SCRIPTS = {module.__name__: module for module in (grpo, dr_grpo, sign_grpo, length_alpha, ep_grpo)}
GROUP_MEAN = [name for name in SCRIPTS if name != "sign_grpo"]
C = 16  # --max_new_tokens in this file
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
every_script = pytest.mark.parametrize("name", SCRIPTS)


def make_args(name, **changed):
    return SCRIPTS[name].Args(max_new_tokens=C, **changed)


def make_batch(name, kind="random", seed=0, P=3, G=4, T=7, off_mask=0.0, device="cpu"):
    """A rollout of the given kind; what a masked position holds is `off_mask`."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (P * G, 1), generator=draws)
    rewards = (torch.rand(P, G, generator=draws) < 0.5).float()
    entropies = 2 * torch.rand(P * G, T, generator=draws)
    if kind == "all right":
        rewards.fill_(1.0)
    elif kind == "all wrong":
        rewards.fill_(0.0)
    elif kind == "graded" and name != "sign_grpo":  # which takes 0 and 1 only
        rewards = torch.randn(P, G, generator=draws)
    elif kind == "flat entropy":
        entropies.fill_(0.7)
    elif kind == "zero entropy":
        entropies.fill_(0.0)
        entropies[:G] = 0.3  # one group has some, in other tokens than those of the next
    elif kind == "one token":
        lengths.fill_(1)
    elif kind == "empty rows":
        lengths[::3] = 0
    mask = torch.arange(T) < lengths
    old_logps = -3 * torch.rand(P * G, T, generator=draws)
    ref_logps = old_logps + 0.3 * torch.randn(P * G, T, generator=draws)
    old_logps, ref_logps, entropies = (torch.where(mask, x, off_mask) for x in (old_logps, ref_logps, entropies))
    tensors = dict(rewards=rewards, mask=mask, old_logps=old_logps, ref_logps=ref_logps, entropies=entropies)
    return SCRIPTS[name].Batch(**{key: x.to(device) for key, x in tensors.items()})


def both(name, batch, args):
    return SCRIPTS[name].compute_advantages(batch, args), SCRIPTS[name].compute_weights(batch, args)


# --- an independent version: plain loops over Python's floats, which are float64 ---


def mean(values):
    return sum(values) / len(values)


def spread(values, ddof):
    center = mean(values)
    return math.sqrt(sum((x - center) ** 2 for x in values) / (len(values) - ddof))


def slow_outcome(name, rewards, args):
    """What each response of one group is worth."""
    if name == "sign_grpo":
        return [1.0 if r == 1 else -1.0 for r in rewards]
    if all(r == rewards[0] for r in rewards):
        return [0.0] * len(rewards)
    scaled = name in ("grpo", "ep_grpo") or name == "length_alpha" and args.scale_rewards
    scale = spread(rewards, ddof=1) + 1e-4 if scaled else 1.0
    return [(r - mean(rewards)) / scale for r in rewards]


def slow_buckets(entropies, args):
    """The bucket of each token of one response, by the share of the entropy that is spent when it has been drawn."""
    total = sum(entropies)
    buckets, so_far = [], 0.0
    for entropy in entropies:
        so_far += entropy
        progress = so_far / total if total > 0 else 0.0
        buckets.append(min(math.floor(args.buckets * progress), args.buckets - 1))
    return buckets


def slow_advantages(name, batch, args):
    P, G = batch.rewards.shape
    result = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for p in range(P):
        rewards = batch.rewards[p].tolist()
        outcome = slow_outcome(name, rewards, args)
        tokens = [(g, t) for g in range(G) for t in range(batch.mask.shape[1]) if batch.mask[p * G + g, t]]
        if name != "ep_grpo":
            for g, t in tokens:
                result[p * G + g, t] = outcome[g]
            continue
        entropy = {(g, t): batch.entropies[p * G + g, t].item() for g, t in tokens}
        delta = {(g, t): batch.old_logps[p * G + g, t].item() - batch.ref_logps[p * G + g, t].item() for g, t in tokens}
        bucket = {}
        for g in range(G):
            own = [token for token in tokens if token[0] == g]
            bucket.update(zip(own, slow_buckets([entropy[token] for token in own], args)))
        for g, t in tokens:
            gate = 1.0
            if args.entropy_gate:
                apart = entropy[g, t] - mean(entropy.values())
                gate = 1 / (1 + math.exp(-args.gate_sharpness * apart / (spread(entropy.values(), ddof=0) + 1e-6)))
            peers = [delta[token] for token in tokens if bucket[token] == bucket[g, t]]
            z = (delta[g, t] - mean(peers)) / (spread(peers, ddof=0) + 1e-3)
            if any(r != rewards[0] for r in rewards):
                anchor = (outcome[g] > 0) - (outcome[g] < 0)
            elif args.zero_variance_anchor:
                anchor = (rewards[g] > args.reward_threshold) - (rewards[g] < args.reward_threshold)
            else:
                anchor = 0
            result[p * G + g, t] = gate * outcome[g] + args.progress_weight * anchor * z
    return result


def slow_weights(name, batch, args):
    B, T = batch.mask.shape
    result = torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        length = sum(batch.mask[i].tolist())
        for t in range(T):
            if not batch.mask[i, t]:
                continue
            if name in ("grpo", "ep_grpo"):
                result[i, t] = 1 / length / B
            elif name in ("dr_grpo", "sign_grpo"):
                result[i, t] = 1 / args.max_new_tokens / B
            else:
                result[i, t] = length ** (args.alpha - 1) / args.max_new_tokens**args.alpha / B
    return result


KINDS = ["random", "graded", "all right", "all wrong", "flat entropy", "zero entropy", "one token", "empty rows"]
VARIED = {  # flags other than the defaults, for the scripts that have some
    "length_alpha": [dict(alpha=a, scale_rewards=s) for a in (0.0, 0.3, 1.0, 1.5) for s in (False, True)],
    "ep_grpo": [
        dict(entropy_gate=False), dict(zero_variance_anchor=False), dict(progress_weight=0.0),
        dict(gate_sharpness=3.0, buckets=3, progress_weight=0.7, reward_threshold=-0.2), dict(buckets=1),
    ],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("off_mask", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
@every_script
def test_equal_to_slow_loops(name, kind, off_mask, device):
    for seed, flags in itertools.product(range(2), [{}] + VARIED.get(name, [])):
        args, batch = make_args(name, **flags), make_batch(name, kind, seed, off_mask=off_mask, device=device)
        advantages, weights = both(name, batch, args)
        for result in (advantages, weights):
            assert result.dtype == torch.float32 and result.shape == batch.mask.shape
            assert result.device == batch.mask.device and not result[~batch.mask].any()  # 0 off the mask, not NaN
        assert weights[batch.mask].all()  # and nowhere else: it is how policy_loss knows the mask
        slow = slow_advantages(name, batch, args), slow_weights(name, batch, args)
        torch.testing.assert_close(advantages.cpu(), slow[0].float(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(weights.cpu(), slow[1].float(), rtol=1e-6, atol=0)


@every_script
def test_pure(name):
    """The same in, the same out, and nothing written into what was handed in."""
    batch, args = make_batch(name, off_mask=math.nan), make_args(name)
    before = {key: x.clone() for key, x in vars(batch).items() if x is not None}
    first, again = both(name, batch, args), both(name, batch, args)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    for key, x in before.items():
        assert torch.equal(x.nan_to_num(7.0) if x.is_floating_point() else x,
                           getattr(batch, key).nan_to_num(7.0) if x.is_floating_point() else getattr(batch, key)), key
    assert args == make_args(name)
    if not args.scores_first:  # then no scoring pass is paid for: the three fields need not exist
        bare = SCRIPTS[name].Batch(batch.rewards, batch.mask)
        assert torch.equal(both(name, bare, args)[0], first[0])


@every_script
def test_vectorised(name):
    """No loop of Python's over rows, tokens or buckets, in any spelling."""
    loops = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    per_item = {"map", "filter", "range", "enumerate", "zip", "vmap", "item", "tolist", "numpy", "split", "unbind"}
    for function in functions(algorithm_parts(name)[1]):
        for node in ast.walk(function):
            assert not isinstance(node, loops), f"{function.name}, line {node.lineno}"
            assert getattr(node, "id", getattr(node, "attr", None)) not in per_item, f"{function.name}: {node.lineno}"


# --- endpoints, to the last bit ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha, scale_rewards, name", [
    (0.0, True, "grpo"), (0, True, "grpo"), (1.0, False, "dr_grpo"), (1, False, "dr_grpo"),
])  # fmt: skip
def test_length_alpha_endpoints(alpha, scale_rewards, name, kind):
    for seed in range(5):
        batch = make_batch(name, kind, seed, off_mask=math.nan)
        ours = both("length_alpha", batch, make_args("length_alpha", alpha=alpha, scale_rewards=scale_rewards))
        for mine, theirs in zip(ours, both(name, batch, make_args(name))):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("alpha, name", [(0.0, "grpo"), (1.0, "dr_grpo")])
def test_length_alpha_endpoints_at_every_length(alpha, name):
    for longest in (1000, 1024):
        batch = grpo.Batch(torch.zeros(1, longest), torch.ones(longest, longest, dtype=torch.bool).tril())
        args = length_alpha.Args(alpha=alpha, max_new_tokens=longest)
        theirs = SCRIPTS[name].compute_weights(batch, SCRIPTS[name].Args(max_new_tokens=longest))
        assert torch.equal(length_alpha.compute_weights(batch, args), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_ep_grpo_with_its_three_parts_off_is_grpo(kind):
    args = make_args("ep_grpo", entropy_gate=False, progress_weight=0.0, zero_variance_anchor=False)
    for seed in range(5):
        batch = make_batch("ep_grpo", kind, seed, off_mask=math.nan)
        for mine, theirs in zip(both("ep_grpo", batch, args), both("grpo", batch, make_args("grpo"))):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_ep_grpo_progress_is_exactly_0_while_policy_and_reference_agree(kind):
    batch = make_batch("ep_grpo", kind, off_mask=math.nan)
    batch.ref_logps = batch.old_logps.clone()
    with_progress = ep_grpo.compute_advantages(batch, make_args("ep_grpo", progress_weight=1e6))
    assert torch.equal(with_progress, ep_grpo.compute_advantages(batch, make_args("ep_grpo", progress_weight=0.0)))


# --- the faults of the loss that users report, by their numbers ---


def loss_and_gradient(name, logps, batch, advantages, weights, args, rows=slice(None), columns=slice(None)):
    """policy_loss over some rows and columns, its metrics, and the gradient in the log-probs."""
    logps = logps.clone().requires_grad_()
    ref_logps = None if batch.ref_logps is None else batch.ref_logps[rows, columns]
    parts = (x[rows, columns] for x in (advantages, weights))
    loss, metrics = SCRIPTS[name].policy_loss(
        logps[rows, columns], batch.old_logps[rows, columns], ref_logps, *parts, args)  # fmt: skip
    loss.backward()
    return loss.detach(), logps.grad, metrics


def drifted(batch, seed=1):
    """Log-probs after an update: the ratio is on both sides of the clip."""
    return batch.old_logps + 0.4 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed))


@every_script
def test_1_cutting_the_batch_changes_neither_loss_nor_gradient(name):
    batch, args = make_batch(name, P=4), make_args(name, beta=0.04)
    advantages, weights = both(name, batch, args)
    logps = drifted(batch)
    whole, gradient, _ = loss_and_gradient(name, logps, batch, advantages, weights, args)
    lengths = batch.mask.sum(1)
    for cuts in ([16], [1] * 16, [5, 1, 7, 3], [9, 7]):
        total, summed = 0.0, torch.zeros_like(gradient)
        for rows in lengths.argsort(descending=True).split(cuts):  # as the loop does, trimmed to the longest
            part = slice(lengths[rows].max())
            loss, part_gradient, _ = loss_and_gradient(name, logps, batch, advantages, weights, args, rows, part)
            total, summed = total + loss, summed + part_gradient
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(summed, gradient, rtol=0, atol=0)  # each token's gradient is its own


@every_script
def test_5_first_step_has_the_gradient_of_reinforce(name):
    """Before the first update the ratio is 1, so the loss is minus the weighted sum of advantages: a number that says
    nothing. Its gradient is that of -sum W A log pi, REINFORCE's."""
    batch, args = make_batch(name), make_args(name)
    advantages, weights = both(name, batch, args)
    draws = torch.Generator().manual_seed(2)
    logits = torch.randn(*batch.mask.shape, 5, generator=draws).requires_grad_()
    drawn = torch.randint(5, (*batch.mask.shape, 1), generator=draws)
    logps = logits.log_softmax(-1).gather(-1, drawn)[..., 0]
    loss, metrics = SCRIPTS[name].policy_loss(logps, logps.detach(), None, advantages, weights, args)
    ours = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    reinforce = torch.autograd.grad(-(weights * advantages * logps).sum(), logits)[0]
    torch.testing.assert_close(ours, reinforce)
    assert ours.abs().max() > 1e-4 and metrics["clip_frac"] == 0
    torch.testing.assert_close(loss, -(weights * advantages).sum())


@pytest.mark.parametrize("name, flags", [
    ("grpo", {}), ("length_alpha", dict(alpha=0.0)), ("ep_grpo", dict(entropy_gate=False, progress_weight=0.0)),
])  # fmt: skip
def test_5_first_step_has_a_loss_of_about_0(name, flags):
    """Advantages sum to 0 in a group, and here every response weighs the same."""
    for seed in range(5):
        batch, args = make_batch(name, seed=seed), make_args(name, **flags)
        loss, gradient, _ = loss_and_gradient(name, batch.old_logps, batch, *both(name, batch, args), args)
        assert abs(loss) < 1e-6 and gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", GROUP_MEAN)
def test_6_equal_rewards_give_exact_zeros(name):
    """The float32 mean of twelve times 0.1 is not 0.1, nor its std 0: a quotient of the two is no small number."""
    assert torch.full((12,), 0.1).std() > 0 and torch.full((12,), 0.1).mean() != torch.tensor(0.1)
    batch = make_batch(name, P=2, G=12)
    off = {"ep_grpo": [dict(zero_variance_anchor=False), dict(progress_weight=0.0)],
           "length_alpha": [dict(scale_rewards=True), dict(scale_rewards=False)]}.get(name, [{}])
    for value, flags in itertools.product([0.1, 1 / 3, 1.0, 0.0, -2.7], off):
        batch.rewards = torch.full((2, 12), value)
        assert not both(name, batch, make_args(name, **flags))[0].any()
    batch.rewards[0, 0] += 1e-3  # nearly equal is not equal; and the other group stays at 0
    advantages = both(name, batch, make_args(name, **off[0]))[0]
    assert advantages[:12].any() and not advantages[12:].any()


@every_script
def test_6_a_group_of_one(name):
    """It would be its own mean. With a fixed reference it is a group like any other."""
    batch, args = make_batch(name, G=1), make_args(name)
    if name in GROUP_MEAN:
        with pytest.raises(ValueError, match="at least two"):
            SCRIPTS[name].compute_advantages(batch, args)
        with pytest.raises(BadInput, match="--group_size must be at least 2, not 1"):
            SCRIPTS[name].main(make_args(name, group_size=1))
    else:
        assert (SCRIPTS[name].compute_advantages(batch, args)[batch.mask].abs() == 1).all()
        assert args.min_group_size == 1


def test_6_the_std_has_ddof_1():
    batch = grpo.Batch(torch.tensor([[1.0, 0.0]]), torch.ones(2, 1, dtype=torch.bool))
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)  # with ddof 0 it would be 0.5 / 0.5001
    torch.testing.assert_close(grpo.compute_advantages(batch, make_args("grpo"))[:, 0],
                               torch.tensor([expected, -expected]))


@every_script
def test_7_a_group_sees_no_other_group(name):
    batch, args = make_batch(name, P=5), make_args(name)
    advantages = both(name, batch, args)[0]
    for p in range(5):
        rows = slice(4 * p, 4 * p + 4)
        alone = SCRIPTS[name].Batch(
            batch.rewards[p : p + 1], batch.mask[rows], old_logps=batch.old_logps[rows],
            ref_logps=batch.ref_logps[rows], entropies=batch.entropies[rows])  # fmt: skip
        torch.testing.assert_close(both(name, alone, args)[0], advantages[rows], rtol=1e-6, atol=1e-7)


def test_8_the_aggregation_is_the_one_named():
    """Two responses, of one and of three tokens, in numbers to check by hand."""
    mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
    batch = grpo.Batch(torch.tensor([[1.0, 0.0]]), mask)
    by_response = torch.tensor([[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]])  # 1 / L / B: each response sums to 1 / 2
    constant = torch.tensor([[1 / 32, 0, 0, 0], [1 / 32, 1 / 32, 1 / 32, 0]])  # 1 / C / B, C = 16
    between = torch.tensor([[1 / 8, 0, 0, 0], [3**-0.5 / 8] * 3 + [0]])  # L^-1/2 / C^1/2 / B
    for name, expected in {"grpo": by_response, "ep_grpo": by_response, "dr_grpo": constant, "sign_grpo": constant,
                           "length_alpha": between}.items():
        torch.testing.assert_close(SCRIPTS[name].compute_weights(batch, make_args(name)), expected)


@pytest.mark.parametrize("off_mask", [0.0, 5.0, math.nan])
@every_script
def test_8_and_14_twenty_pad_columns_change_nothing(name, off_mask):
    args = make_args(name, beta=0.04)
    batch = make_batch(name)
    wide = make_batch(name)
    for field in ("old_logps", "ref_logps", "entropies"):
        pads = torch.full((len(batch.mask), 20), off_mask)
        setattr(wide, field, torch.cat([getattr(batch, field), pads], 1))
    wide.mask = torch.cat([batch.mask, torch.zeros(len(batch.mask), 20, dtype=torch.bool)], 1)
    short, long = both(name, batch, args), both(name, wide, args)
    for a, b in zip(short, long):
        torch.testing.assert_close(b[:, :7], a, rtol=1e-6, atol=1e-7)  # a float64 sum's order may differ, no more
        assert not b[:, 7:].any()
    logps = drifted(batch)
    loss, gradient, metrics = loss_and_gradient(name, logps, batch, *short, args)
    wide_logps = torch.cat([logps, torch.full((len(logps), 20), off_mask)], 1)
    wide_loss, wide_gradient, wide_metrics = loss_and_gradient(name, wide_logps, wide, *long, args)
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:, :7], gradient, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(wide_metrics, metrics)


@every_script
def test_9_truncated_and_empty_rows_give_no_nan(name):
    args = make_args(name, beta=0.04)
    full = torch.ones(12, C)
    for mask in (full, 0 * full, full.tril(), full.tril(-3)):  # all cut off, all empty, all ended, three of them empty
        batch = make_batch(name, T=C)
        batch.mask = mask.bool()
        advantages, weights = both(name, batch, args)
        loss, gradient, metrics = loss_and_gradient(name, drifted(batch), batch, advantages, weights, args)
        for result in (advantages, weights, loss, gradient, *metrics.values()):
            assert result.isfinite().all()
        assert mask.any() or loss == 0


@every_script
def test_10_masked_positions_may_hold_anything(name):
    """A NaN under the mask must not come back through 0 * NaN, neither in the loss nor in its gradient."""
    args = make_args(name, beta=0.04)
    clean = make_batch(name)
    advantages, weights = both(name, clean, args)
    logps = drifted(clean)
    loss, gradient, metrics = loss_and_gradient(name, logps, clean, advantages, weights, args)
    assert not gradient[~clean.mask].any() and gradient[clean.mask].any()
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty = make_batch(name, off_mask=junk)
        dirty_logps, dirty_advantages = (torch.where(clean.mask, x, junk) for x in (logps, advantages))
        again = loss_and_gradient(name, dirty_logps, dirty, dirty_advantages, weights, args)
        assert torch.equal(again[0], loss) and torch.equal(again[1], gradient) and again[2] == metrics
    logps[tuple(clean.mask.nonzero()[0])] = math.nan  # one that counts is not hidden: such a step must be refused
    loss, gradient, _ = loss_and_gradient(name, logps, clean, advantages, weights, args)
    assert loss.isnan() and gradient.isnan().any()


def test_11_ratio_is_exactly_1_and_kl_exactly_0_where_all_three_agree():
    batch, args = make_batch("grpo"), make_args("grpo", beta=1.0)
    batch.ref_logps = batch.old_logps
    advantages, weights = both("grpo", batch, args)
    with_kl, gradient, metrics = loss_and_gradient("grpo", batch.old_logps, batch, advantages, weights, args)
    batch.ref_logps = None
    without, plain, bare = loss_and_gradient("grpo", batch.old_logps, batch, advantages, weights, args)
    assert metrics["kl"] == 0 and metrics["clip_frac"] == 0 and "kl" not in bare
    assert torch.equal(with_kl, without) and torch.equal(gradient, plain)
    assert torch.equal(gradient, -weights * advantages)  # so the ratio was 1 to the last bit


@pytest.mark.parametrize("apart", [100.0, 1000.0, -100.0])
def test_12_a_far_reference_stays_finite(apart):
    batch, args = make_batch("grpo"), make_args("grpo", beta=0.04)
    advantages, weights = both("grpo", batch, args)
    batch.ref_logps = batch.old_logps.clone()
    batch.ref_logps[0, 0] += apart
    loss, gradient, metrics = loss_and_gradient("grpo", batch.old_logps, batch, advantages, weights, args)
    assert loss.isfinite() and gradient.isfinite().all() and metrics["kl"].isfinite()
    assert metrics["kl"] > 1  # seen, not hidden


def test_12_a_near_reference_is_exact():
    """The bound that keeps exp finite is far from anything that training meets."""
    batch, args = make_batch("grpo"), make_args("grpo", beta=0.04)
    batch.ref_logps = batch.old_logps + 19.0
    _, _, metrics = loss_and_gradient("grpo", batch.old_logps, batch, *both("grpo", batch, args), args)
    torch.testing.assert_close(metrics["kl"].item(), math.exp(19) - 20, rtol=1e-4, atol=0)


@pytest.mark.parametrize("ratio, advantage, objective, slope", [
    (0.5, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0), (1.5, 1.0, 1.2, 0.0),
    (0.5, -1.0, -0.8, 0.0), (1.0, -1.0, -1.0, -1.0), (1.5, -1.0, -1.5, -1.5),
])  # fmt: skip
def test_13_clip_table(ratio, advantage, objective, slope):
    batch = grpo.Batch(torch.zeros(1, 2), torch.ones(1, 1, dtype=torch.bool), old_logps=torch.tensor([[-1.0]]))
    one, args = torch.ones(1, 1), make_args("grpo")
    logps = batch.old_logps + math.log(ratio)
    loss, gradient, metrics = loss_and_gradient("grpo", logps, batch, advantage * one, one, args)
    torch.testing.assert_close(-loss.item(), objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(-gradient.item(), slope, rtol=1e-6, atol=0)
    assert metrics["clip_frac"] == (slope == 0)  # bound: where the gradient is cut, not wherever the ratio is far


def test_13_clip_low_and_clip_high_are_two_flags():
    batch = grpo.Batch(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), old_logps=torch.zeros(1, 2))
    logps = torch.tensor([[0.6, 1.35]]).log()
    args = make_args("grpo", clip_low=0.3, clip_high=0.4)  # [0.7, 1.4]: the first is out, the second is in
    loss, _, metrics = loss_and_gradient("grpo", logps, batch, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), args)
    torch.testing.assert_close(loss, torch.tensor(0.7 - 1.35))
    assert metrics["clip_frac"] == 0.5


def test_13_clip_frac_counts_bound_unmasked_tokens():
    ratios = torch.tensor([[0.5, 0.5, 1.5, 1.5, 1.0, 9.0, 9.0]])
    advantages = torch.tensor([[-1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0]])  # bound: the first and the third
    mask = torch.tensor([[True] * 5 + [False] * 2])
    batch = grpo.Batch(torch.zeros(1, 2), mask, old_logps=torch.zeros(1, 7))
    args = make_args("grpo")
    _, _, metrics = loss_and_gradient("grpo", ratios.log(), batch, advantages, mask / 5, args)
    torch.testing.assert_close(metrics["clip_frac"], torch.tensor(2 / 5))


def test_14_entropy_statistics_never_see_pads():
    """All of EP-GRPO's: the gate's mean and spread, the progress along a response, the buckets' means and spreads."""
    args = make_args("ep_grpo", progress_weight=1.0)
    clean = ep_grpo.compute_advantages(make_batch("ep_grpo"), args)
    for junk in (1e6, -3.0, math.nan, math.inf):
        assert torch.equal(ep_grpo.compute_advantages(make_batch("ep_grpo", off_mask=junk), args), clean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_script
def test_15_rewards_that_are_no_numbers_raise(name, bad):
    batch = make_batch(name)
    batch.rewards[1, 2] = bad
    with pytest.raises(ValueError, match="rewards must be"):
        SCRIPTS[name].compute_advantages(batch, make_args(name))


@pytest.mark.parametrize("bad", [None, math.nan])
def test_15_a_verifier_that_returns_no_number_stops_the_run(bad, data, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "verify", lambda text, answer: bad)
    args = grpo.parse_args(["--dataset", f"{data}/train.jsonl", "--output_dir", str(tmp_path / "run"), "--steps", "1",
                            "--prompts_per_step", "2", "--group_size", "2", "--max_new_tokens", "4"])  # fmt: skip
    with pytest.raises((ValueError, TypeError, RuntimeError), match="rewards must be|NoneType"):
        grpo.main(args)


@pytest.mark.parametrize("bad", [0.5, -1.0, 2.0])
def test_sign_grpo_refuses_rewards_other_than_0_and_1(bad):
    batch = make_batch("sign_grpo")
    batch.rewards[0, 1] = bad
    with pytest.raises(ValueError, match="0 or 1"):
        sign_grpo.compute_advantages(batch, make_args("sign_grpo"))


# --- the five files are one diff apart ---

FIRST_MARK, SECOND_MARK = "    # --- algorithm ---\n", "\n# --- algorithm ---\n"
END_MARK = "\n# --- the same in all five scripts, from here to the end ---\n"
LIMITS = {"dr_grpo": 20, "sign_grpo": 20, "length_alpha": 20, "ep_grpo": 70}


def code(name):
    """A script's text without its docstring."""
    source = (ROOT / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0]
    assert ast.get_docstring(ast.parse(source))
    return "".join(source.splitlines(keepends=True)[docstring.end_lineno :])


def cut(name):
    """The text in five parts: shared, the algorithm's fields, shared, the algorithm's functions, shared."""
    source = code(name)
    assert source.count(FIRST_MARK) == source.count(SECOND_MARK) == source.count(END_MARK) == 1
    head, rest = source.split(FIRST_MARK)
    fields, rest = rest.split("\n\n", 1)
    middle, rest = rest.split(SECOND_MARK)
    block, tail = rest.split(END_MARK)
    return head, fields, middle, block, tail


def algorithm_parts(name):
    _, fields, _, block, _ = cut(name)
    return fields, block


def shared_parts(name):
    head, _, middle, _, tail = cut(name)
    return head, middle, tail


def functions(block):
    return ast.parse(block).body


@pytest.fixture
def differences(tmp_path):
    """Lines and hunks that plain `diff` shows between grpo.py and each script, docstrings aside."""
    for name in SCRIPTS:
        (tmp_path / name).write_text(code(name))

    def count(name):
        command = ["diff", str(tmp_path / "grpo"), str(tmp_path / name)]
        shown = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return sum(line[0] in "<>" for line in shown), sum(line[0].isdigit() for line in shown)

    return {name: count(name) for name in LIMITS}


@pytest.mark.parametrize("name", LIMITS)
def test_all_but_the_algorithm_is_the_same_to_the_byte(name):
    for ours, theirs in zip(shared_parts(name), shared_parts("grpo")):
        assert ours == theirs


@every_script
def test_the_algorithm_is_fields_and_two_functions(name):
    fields, block = algorithm_parts(name)
    assert [node.name for node in functions(block)] == ["compute_advantages", "compute_weights"]
    assert all(re.match(r"    \w+(: \w+ = arg\(| = )", line) for line in fields.splitlines())
    assert SCRIPTS[name].Args.__module__ == SCRIPTS[name].compute_weights.__module__ == name


@every_script
def test_no_name_of_an_algorithm_in_code(name):
    """The run's name comes from __file__. In help texts and comments of the algorithm's own part a name may stand."""
    words = re.compile(r"grpo|length_?alpha|\bsign\b|\bep\b", re.IGNORECASE)
    for part in shared_parts(name):
        assert not words.search(part), words.search(part)
    for token in tokenize.generate_tokens(io.StringIO(code(name)).readline):
        if token.type == tokenize.NAME:
            assert not re.search("grpo|length_alpha", token.string, re.IGNORECASE), token


def test_grpo_is_shorter_than_400_lines():
    assert len((ROOT / "grpo.py").read_text().splitlines()) < 400


@pytest.mark.parametrize("name", LIMITS)
def test_diff_is_short(name, differences):
    lines, hunks = differences[name]
    assert 0 < lines <= LIMITS[name] and 0 < hunks <= 3


def test_table_in_readme_counts_the_real_differences(differences):
    readme = (ROOT / "README.md").read_text()
    table = readme.split("<!-- diff table -->")[1].split("<!-- /diff table -->")[0]
    rows = re.findall(r"^\| `?(\w+)\.py`? \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    assert {name: (int(lines), int(hunks)) for name, lines, hunks in rows} == differences


# --- TRL's numbers ---

TRL = json.loads(Path(__file__).with_name("trl_fixture.json").read_text())


ENDPOINTS = {  # which of our scripts, under which flags, has TRL's loss_type
    "grpo": {"grpo": {}, "length_alpha": dict(alpha=0.0, scale_rewards=True),
             "ep_grpo": dict(entropy_gate=False, progress_weight=0.0, zero_variance_anchor=False)},
    "dr_grpo": {"dr_grpo": {}, "length_alpha": dict(alpha=1.0)},
}  # fmt: skip


@pytest.mark.parametrize("name, flags, case", [
    pytest.param(name, flags, case, id=f"{name} beta {case['beta']}")
    for case in TRL["cases"] for name, flags in ENDPOINTS[case["loss_type"]].items()
])  # fmt: skip
def test_advantages_loss_and_gradient_are_those_of_trl(name, flags, case):
    """make_trl_fixture.py says how TRL's were computed."""
    args = SCRIPTS[name].Args(max_new_tokens=TRL["max_new_tokens"], beta=case["beta"], clip_low=TRL["clip_low"],
                              clip_high=TRL["clip_high"], **flags)  # fmt: skip
    logps, old_logps, ref_logps = (torch.tensor(TRL[key]) for key in ("logps", "old_logps", "ref_logps"))
    mask = torch.arange(logps.shape[1]) < torch.tensor(TRL["lengths"])[:, None]
    rewards = torch.tensor(TRL["rewards"]).view(-1, TRL["group_size"])
    batch = SCRIPTS[name].Batch(rewards, mask, old_logps=old_logps, ref_logps=ref_logps, entropies=-logps)
    advantages, weights = both(name, batch, args)
    loss, gradient, metrics = loss_and_gradient(name, logps, batch, advantages, weights, args)
    theirs = torch.where(mask, torch.tensor(case["advantages"])[:, None], 0.0)
    torch.testing.assert_close(advantages, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss.item(), case["loss"], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(metrics["clip_frac"].item(), case["clip_frac"], rtol=0, atol=1e-5)
    if case["beta"]:
        torch.testing.assert_close(metrics["kl"].item(), case["kl"], rtol=0, atol=1e-5)


def test_trl_fixture_is_no_easy_case():
    """The clip binds on both sides, a group is equal, a response is shorter than C: else agreement would say little."""
    ratios = (torch.tensor(TRL["logps"]) - torch.tensor(TRL["old_logps"])).exp()
    assert (ratios < 0.8).any() and (ratios > 1.28).any() and 0.1 < TRL["cases"][0]["clip_frac"] < 0.5
    assert max(TRL["lengths"]) < TRL["max_new_tokens"] and len(set(TRL["lengths"])) > 3
    settings = [(case["loss_type"], case["scale_rewards"], case["beta"]) for case in TRL["cases"]]
    assert settings == [(*loss, beta) for loss in [("grpo", "group"), ("dr_grpo", "none")] for beta in (0.0, 0.04)]


def test_12_a_policy_that_has_moved_by_100_is_finite():
    """Fault: exp(100) is infinite in float32, and the gradient of a clipped token becomes 0 times infinity."""
    for advantage, expected in ((1.0, 0.0), (0.0, 0.0)):  # the clip binds; no signal: no gradient in either
        logps = torch.zeros(1, 2, requires_grad=True)
        old_logps = torch.tensor([[-100.0, 0.0]])
        advantages = torch.tensor([[advantage, 0.0]])
        loss, _ = grpo.policy_loss(logps, old_logps, None, advantages, torch.full((1, 2), 0.5), grpo.Args())
        loss.backward()
        assert loss.isfinite() and logps.grad[0, 0] == expected
    logps = torch.zeros(1, 1, requires_grad=True)
    arguments = torch.tensor([[-100.0]]), None, torch.tensor([[-1.0]]), torch.ones(1, 1), grpo.Args()
    loss, _ = grpo.policy_loss(logps, *arguments)
    loss.backward()
    assert loss.isfinite() and logps.grad.isfinite().all() and logps.grad[0, 0] > 1e6  # pushed down, and hard
