"""compute_advantages and compute_weights of the five scripts, against slow loops in float64.

Also where two algorithms must agree to the last bit, and what both functions may read and write.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, both, every_script, make_args, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

import dr_grpo
import ep_grpo
import grpo
import length_alpha
import sign_grpo

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
KINDS = ["random", "graded", "all right", "all wrong", "flat entropy", "zero entropy", "one token",
         "empty rows"]  # fmt: skip
VARIED = {  # flags other than the defaults
    length_alpha: [
        dict(alpha=a, scale_rewards=s) for a in (0.0, 0.3, 1.0, 1.5) for s in (False, True)
    ],
    ep_grpo: [
        dict(entropy_gate=False),
        dict(zero_variance_anchor=False),
        dict(progress_weight=0.0),
        dict(gate_sharpness=3.0, buckets=3, progress_weight=0.7, reward_threshold=-0.2),
        dict(buckets=1),
    ],
}


# --- an independent version: plain loops over Python's floats, which are float64 ---
def mean(values):
    return sum(values) / len(values)


def spread(values, ddof):
    center = mean(values)
    return math.sqrt(sum((x - center) ** 2 for x in values) / (len(values) - ddof))


def slow_outcome(script, rewards, args):
    """The advantage of each response of one group."""
    if script is sign_grpo:
        return [1.0 if r == 1 else -1.0 for r in rewards]
    if all(r == rewards[0] for r in rewards):
        return [0.0] * len(rewards)
    scaled = script in (grpo, ep_grpo) or script is length_alpha and args.scale_rewards
    scale = spread(rewards, ddof=1) + 1e-4 if scaled else 1.0
    return [(r - mean(rewards)) / scale for r in rewards]


def slow_buckets(entropies, args):
    """The bucket of each token of one response, by the share of entropy up to and including it."""
    total = sum(entropies)
    buckets = []
    so_far = 0.0
    for entropy in entropies:
        so_far += entropy
        progress = so_far / total if total > 0 else 0.0
        buckets.append(min(math.floor(args.buckets * progress), args.buckets - 1))
    return buckets


def slow_anchor(rewards, reward, outcome, args):
    """The direction in which the progress term of a response points: 1, -1 or 0."""
    if any(r != rewards[0] for r in rewards):
        return (outcome > 0) - (outcome < 0)
    if args.zero_variance_anchor:
        return (reward > args.reward_threshold) - (reward < args.reward_threshold)
    return 0


def slow_ep_group(rewards, entropy, delta, args):
    """EP-GRPO's advantages of one group; entropy and delta are {(response, position): number}."""
    outcome = slow_outcome(ep_grpo, rewards, args)
    bucket = {}
    for g in range(len(rewards)):
        own = [token for token in entropy if token[0] == g]
        bucket.update(zip(own, slow_buckets([entropy[token] for token in own], args)))
    result = {}
    for g, t in entropy:
        gate = 1.0
        if args.entropy_gate:
            excess = entropy[g, t] - mean(entropy.values())
            scaled = excess / (spread(entropy.values(), ddof=0) + 1e-6)
            gate = 1 / (1 + math.exp(-args.gate_sharpness * scaled))
        peers = [delta[token] for token in delta if bucket[token] == bucket[g, t]]
        z = (delta[g, t] - mean(peers)) / (spread(peers, ddof=0) + 1e-3)
        anchor = slow_anchor(rewards, rewards[g], outcome[g], args)
        result[g, t] = gate * outcome[g] + args.progress_weight * anchor * z
    return result


def slow_advantages(script, batch, args):
    P, G = batch.rewards.shape
    result = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for p in range(P):
        rewards = batch.rewards[p].tolist()
        tokens = [tuple(token) for token in batch.mask[p * G : (p + 1) * G].nonzero().tolist()]
        if script is ep_grpo:
            entropy = {(g, t): batch.entropies[p * G + g, t].item() for g, t in tokens}
            old = {(g, t): batch.old_logps[p * G + g, t].item() for g, t in tokens}
            delta = {(g, t): old[g, t] - batch.ref_logps[p * G + g, t].item() for g, t in tokens}
            advantages = slow_ep_group(rewards, entropy, delta, args)
        else:
            outcome = slow_outcome(script, rewards, args)
            advantages = {(g, t): outcome[g] for g, t in tokens}
        for (g, t), advantage in advantages.items():
            result[p * G + g, t] = advantage
    return result


def slow_weights(script, batch, args):
    B = len(batch.mask)
    result = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for i, t in batch.mask.nonzero().tolist():
        length = sum(batch.mask[i].tolist())
        if script in (grpo, ep_grpo):
            result[i, t] = 1 / length / B
        elif script in (dr_grpo, sign_grpo):
            result[i, t] = 1 / args.max_new_tokens / B
        else:
            result[i, t] = length ** (args.alpha - 1) / args.max_new_tokens**args.alpha / B
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("off_mask", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
@every_script
def test_equal_to_slow_loops(script, kind, off_mask, device):
    for seed, flags in itertools.product(range(2), [{}] + VARIED.get(script, [])):
        args = make_args(script, **flags)
        batch = make_batch(script, kind, seed, off_mask=off_mask, device=device)
        advantages, weights = both(script, batch, args)
        for result in (advantages, weights):
            assert result.dtype == torch.float32
            assert result.shape == batch.mask.shape
            assert result.device == batch.mask.device
            assert not result[~batch.mask].any()  # 0 off the mask, not NaN
        slow = slow_advantages(script, batch, args).float()
        torch.testing.assert_close(advantages.cpu(), slow, rtol=1e-5, atol=2e-6)
        slow = slow_weights(script, batch, args).float()
        torch.testing.assert_close(weights.cpu(), slow, rtol=1e-6, atol=0)


# --- what the two functions read, write and cost ---
@every_script
def test_nothing_is_written_into_the_batch(script):
    batch = make_batch(script, off_mask=math.nan)
    args = make_args(script)
    before = {name: x.clone() for name, x in vars(batch).items() if x is not None}
    first = both(script, batch, args)
    again = both(script, batch, args)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for name, x in before.items():
        torch.testing.assert_close(getattr(batch, name), x, rtol=0, atol=0, equal_nan=True)
    assert args == make_args(script)


@every_script
def test_only_rewards_mask_and_scores_are_read(script):
    """Scores only where NEEDS_SCORES says so: otherwise no pass is made for them."""
    batch = make_batch(script)
    args = make_args(script)
    names = ["rewards", "mask"]
    if script.NEEDS_SCORES:
        names += ["old_logps", "ref_logps", "entropies"]
    bare = SimpleNamespace(**{name: getattr(batch, name) for name in names})
    for ours, theirs in zip(both(script, bare, args), both(script, batch, args)):
        assert torch.equal(ours, theirs)
    assert script.NEEDS_SCORES == (script is ep_grpo)


class Count(TorchDispatchMode):
    """Counts the tensor operations inside a with block."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


@every_script
def test_a_larger_batch_takes_no_more_operations(script):
    """No loop over prompts, responses, tokens or buckets."""
    counts = set()
    for P, G, T, buckets in [(2, 2, 3, 2), (5, 4, 6, 10), (9, 7, 40, 33)]:
        flags = {"buckets": buckets} if script is ep_grpo else {}
        batch = make_batch(script, P=P, G=G, T=T)
        with Count() as count:
            both(script, batch, make_args(script, **flags))
        counts.add(count.operations)
    assert len(counts) == 1


# --- endpoints, to the last bit ---
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "alpha, scale_rewards, name",
    [(0.0, True, "grpo"), (0, True, "grpo"), (1.0, False, "dr_grpo"), (1, False, "dr_grpo")])
def test_length_alpha_endpoints(alpha, scale_rewards, name, kind):
    script = SCRIPTS[name]
    args = make_args(length_alpha, alpha=alpha, scale_rewards=scale_rewards)
    for seed in range(5):
        batch = make_batch(script, kind, seed, off_mask=math.nan)
        theirs = both(script, batch, make_args(script))
        for a, b in zip(both(length_alpha, batch, args), theirs):
            assert torch.equal(a, b)


@pytest.mark.parametrize("alpha, name", [(0.0, "grpo"), (1.0, "dr_grpo")])
def test_length_alpha_endpoints_at_every_length(alpha, name):
    script = SCRIPTS[name]
    for longest in (1000, 1024):
        batch = grpo.Batch(mask=torch.ones(longest, longest, dtype=torch.bool).tril())
        args = length_alpha.Args(alpha=alpha, max_new_tokens=longest)
        theirs = script.compute_weights(batch, script.Args(max_new_tokens=longest))
        assert torch.equal(length_alpha.compute_weights(batch, args), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_ep_grpo_with_its_three_parts_off_is_grpo(kind):
    args = make_args(ep_grpo, entropy_gate=False, progress_weight=0.0, zero_variance_anchor=False)
    for seed in range(5):
        batch = make_batch(ep_grpo, kind, seed, off_mask=math.nan)
        theirs = both(grpo, batch, make_args(grpo))
        for a, b in zip(both(ep_grpo, batch, args), theirs):
            assert torch.equal(a, b)


def test_ep_grpo_anchor_of_an_average_response_is_0():
    """In float32 0.9 is not the mean of 0.8, 0.9 and 1.0; its sign would be that of rounding."""
    batch = make_batch(ep_grpo, P=1, G=3)
    batch.rewards = torch.tensor([[0.8, 0.9, 1.0]])
    assert batch.rewards[0, 1] != batch.rewards.mean()
    args = make_args(ep_grpo, entropy_gate=False)
    without = make_args(ep_grpo, entropy_gate=False, progress_weight=0.0)
    with_term, alone = (ep_grpo.compute_advantages(batch, x) for x in (args, without))
    assert torch.equal(with_term[1], alone[1])
    assert not torch.equal(with_term[0], alone[0])


@pytest.mark.parametrize("kind", KINDS)
def test_ep_grpo_progress_is_exactly_0_while_policy_and_reference_agree(kind):
    batch = make_batch(ep_grpo, kind, off_mask=math.nan)
    batch.ref_logps = batch.old_logps.clone()
    large = ep_grpo.compute_advantages(batch, make_args(ep_grpo, progress_weight=1e6))
    none = ep_grpo.compute_advantages(batch, make_args(ep_grpo, progress_weight=0.0))
    assert torch.equal(large, none)


def test_weights_in_numbers_to_check_by_hand():
    """Two responses, of one and of three tokens; B = 2 and C = 16."""
    batch = grpo.Batch(mask=torch.arange(4) < torch.tensor([[1], [3]]))
    by_response = [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]  # 1 / L / B: 1/2 per response
    constant = [[1 / 32, 0, 0, 0], [1 / 32, 1 / 32, 1 / 32, 0]]  # 1 / C / B
    between = [[1 / 8, 0, 0, 0], [3**-0.5 / 8] * 3 + [0]]  # L^-1/2 / C^1/2 / B
    expected = {grpo: by_response, ep_grpo: by_response, dr_grpo: constant, sign_grpo: constant,
                length_alpha: between}  # fmt: skip
    for script, weights in expected.items():
        ours = script.compute_weights(batch, make_args(script))
        torch.testing.assert_close(ours, torch.tensor(weights))


@pytest.mark.parametrize("bad", [0.5, -1.0, 2.0])
def test_sign_grpo_refuses_rewards_other_than_0_and_1(bad):
    batch = make_batch(sign_grpo)
    batch.rewards[0, 1] = bad
    with pytest.raises(ValueError, match="0 or 1"):
        sign_grpo.compute_advantages(batch, make_args(sign_grpo))
