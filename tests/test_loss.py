"""policy_loss, and the advantages and weights that enter it, one reported fault after another.

The number in a test's name is the fault's row in docs/faults.md.
"""

import copy
import itertools
import math

import pytest
import torch
from conftest import (
    SCRIPTS, SMALL, both, every_script, loss_and_gradient, make_args, make_batch, parse, run)

import common
import ep_grpo
import grpo
import length_alpha
import sign_grpo
from common import BadInput

GROUP_MEAN = [script for script in SCRIPTS.values() if script is not sign_grpo]


def drifted(batch, seed=1):
    """Log-probs after an update: ratios on both sides of the clip."""
    draws = torch.Generator().manual_seed(seed)
    return batch.old_logps + 0.4 * torch.randn(batch.mask.shape, generator=draws)


def one_token(old_logp=0.0):
    """A batch of one response of one token."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    return grpo.Batch(mask=mask, old_logps=torch.full((1, 1), old_logp))


# --- 1, 5: micro-batches, the first step ---
@every_script
def test_1_cutting_the_batch_changes_neither_loss_nor_gradient(script):
    batch = make_batch(script, P=4)
    args = make_args(script, beta=0.04)
    advantages, weights = both(script, batch, args)
    logps = drifted(batch)
    whole, gradient, _ = loss_and_gradient(script, logps, batch, advantages, weights, args)
    lengths = batch.mask.sum(1)
    for sizes in ([16], [1] * 16, [5, 1, 7, 3], [9, 7]):
        total = 0.0
        summed = torch.zeros_like(gradient)
        for rows in lengths.argsort(descending=True).split(sizes):
            part = rows, slice(lengths[rows].max())  # trimmed to the longest, as in micro_batches
            loss, d, _ = loss_and_gradient(script, logps, batch, advantages, weights, args, part)
            total += loss
            summed += d
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(summed, gradient, rtol=0, atol=0)  # each token's is its own


@every_script
def test_5_first_step_has_the_gradient_of_reinforce(script):
    """Before the first update the ratio is 1, and the loss minus the weighted sum of advantages.

    That number says nothing. Its gradient is that of REINFORCE, of -sum W A log pi.
    """
    batch = make_batch(script)
    args = make_args(script)
    advantages, weights = both(script, batch, args)
    draws = torch.Generator().manual_seed(2)
    logits = torch.randn(*batch.mask.shape, 5, generator=draws).requires_grad_()
    drawn = torch.randint(5, (*batch.mask.shape, 1), generator=draws)
    logps = logits.log_softmax(-1).gather(-1, drawn)[..., 0]
    loss, metrics = script.policy_loss(
        logps, logps.detach(), None, advantages, weights, batch.mask, args)
    ours = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    reinforce = torch.autograd.grad(-(weights * advantages * logps).sum(), logits)[0]
    torch.testing.assert_close(ours, reinforce)
    assert ours.abs().max() > 1e-4
    assert metrics["clip_frac"] == 0
    torch.testing.assert_close(loss, -(weights * advantages).sum())


@pytest.mark.parametrize(
    "script, flags",
    [(grpo, {}), (length_alpha, dict(alpha=0.0)),
     (ep_grpo, dict(entropy_gate=False, progress_weight=0.0))])
def test_5_first_step_has_a_loss_of_about_0(script, flags):
    """A group's advantages sum to 0, and here every response has the same weight."""
    args = make_args(script, **flags)
    for seed in range(5):
        batch = make_batch(script, seed=seed)
        result = both(script, batch, args)
        loss, gradient, _ = loss_and_gradient(script, batch.old_logps, batch, *result, args)
        assert abs(loss) < 1e-6
        assert gradient.abs().max() > 1e-3


# --- 6 to 9: groups, aggregation, padding, extreme masks ---
@pytest.mark.parametrize("script", GROUP_MEAN, ids=lambda script: script.__name__)
def test_6_equal_rewards_give_exact_zeros(script):
    """In float32 the mean of twelve times 0.1 is not 0.1 and their std is not 0."""
    assert torch.full((12,), 0.1).std() > 0
    assert torch.full((12,), 0.1).mean() != torch.tensor(0.1)
    batch = make_batch(script, P=2, G=12)
    flags = {
        ep_grpo: [dict(zero_variance_anchor=False), dict(progress_weight=0.0)],
        length_alpha: [dict(scale_rewards=True), dict(scale_rewards=False)],
    }.get(script, [{}])
    for value, changed in itertools.product([0.1, 1 / 3, 1.0, 0.0, -2.7], flags):
        batch.rewards = torch.full((2, 12), value)
        assert not script.compute_advantages(batch, make_args(script, **changed)).any()
    batch.rewards[0, 0] += 1e-3  # nearly equal is not equal; the other group stays at 0
    advantages = script.compute_advantages(batch, make_args(script, **flags[0]))
    assert advantages[:12].any()
    assert not advantages[12:].any()


@every_script
def test_6_a_group_of_one_is_refused(script, data, tmp_path):
    """A response alone in its group is its own mean."""
    with pytest.raises(BadInput, match="--group_size must be at least 2, not 1"):
        run(data, tmp_path, "--group_size", 1, "--steps", 1, script=script)


def test_6_the_std_has_ddof_1():
    batch = grpo.Batch(rewards=torch.tensor([[1.0, 0.0]]), mask=torch.ones(2, 1) > 0)
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)  # with ddof 0 it would be 0.5 / 0.5001
    advantages = grpo.compute_advantages(batch, make_args(grpo))
    torch.testing.assert_close(advantages, torch.tensor([[expected], [-expected]]))


@every_script
def test_7_a_group_sees_no_other_group(script):
    batch = make_batch(script, P=5)
    args = make_args(script)
    advantages = script.compute_advantages(batch, args)
    for p in range(5):
        rows = slice(4 * p, 4 * p + 4)
        names = "mask", "old_logps", "ref_logps", "entropies"
        alone = {name: getattr(batch, name)[rows] for name in names}
        alone = script.Batch(rewards=batch.rewards[p : p + 1], **alone)
        ours = script.compute_advantages(alone, args)
        torch.testing.assert_close(ours, advantages[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("off_mask", [0.0, 5.0, math.nan])
@every_script
def test_8_and_14_twenty_pad_columns_change_nothing(script, off_mask):
    args = make_args(script, beta=0.04)
    batch = make_batch(script)
    pads = torch.full((len(batch.mask), 20), off_mask)
    wide = make_batch(script)
    wide.mask = torch.cat([batch.mask, torch.zeros_like(pads).bool()], 1)
    for name in "old_logps", "ref_logps", "entropies":
        setattr(wide, name, torch.cat([getattr(batch, name), pads], 1))
    logps = drifted(batch)
    wide_logps = torch.cat([logps, pads], 1)
    results = []
    for x, logps in (batch, logps), (wide, wide_logps):
        advantages, weights = both(script, x, args)
        loss, gradient, metrics = loss_and_gradient(script, logps, x, advantages, weights, args)
        for per_token in advantages, weights, gradient:
            assert not per_token[:, 7:].any()
        results.append((advantages[:, :7], weights[:, :7], gradient[:, :7], loss, metrics))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)  # a sum's order may differ, no more


@every_script
def test_9_truncated_and_empty_rows_give_no_nan(script):
    args = make_args(script, beta=0.04)
    full = torch.ones(12, 16)
    # All cut off; all empty; all finished; three of them empty.
    for mask in (full, 0 * full, full.tril(), full.tril(-3)):
        batch = make_batch(script, T=16)
        batch.mask = mask.bool()
        result = both(script, batch, args)
        loss, gradient, metrics = loss_and_gradient(script, drifted(batch), batch, *result, args)
        for x in (*result, loss, gradient, *metrics.values()):
            assert x.isfinite().all()
        assert mask.any() or loss == 0


# --- 10 to 12: what is masked, equal or far away ---
@every_script
def test_10_masked_positions_may_hold_anything(script):
    """A NaN off the mask must not come back as 0 * NaN, neither in the loss nor in its gradient."""
    args = make_args(script, beta=0.04)
    clean = make_batch(script)
    advantages, weights = both(script, clean, args)
    logps = drifted(clean)
    loss, gradient, metrics = loss_and_gradient(script, logps, clean, advantages, weights, args)
    assert not gradient[~clean.mask].any()
    assert gradient[clean.mask].any()
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty = make_batch(script, off_mask=junk)
        given = logps.where(clean.mask, junk), dirty, advantages.where(clean.mask, junk)
        again = loss_and_gradient(script, *given, weights, args)
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], gradient)
        assert again[2] == metrics


def test_10_a_nan_that_counts_is_not_hidden(tiny):
    """The update must see it: clamp has no gradient at NaN, but the model's own is NaN there."""
    batch = make_batch(grpo)
    logps = drifted(batch)
    logps[tuple(batch.mask.nonzero()[0])] = math.nan
    args = make_args(grpo)
    loss, _, _ = loss_and_gradient(grpo, logps, batch, *both(grpo, batch, args), args)
    assert loss.isnan()

    model = copy.deepcopy(tiny[0])
    args = parse(*SMALL)
    stream = grpo.random_stream(0, "draws", 0)
    problem = {"prompt_ids": tiny[1]("3+4=").input_ids}
    batch = grpo.rollout(model, tiny[1], [problem], 4, args, [stream])
    batch.rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    with torch.no_grad():
        model.get_input_embeddings().weight[batch.input_ids[0, -2]] = math.nan
    before = copy.deepcopy(model.state_dict())
    optimizer = common.Float32AdamW(model, args)
    sums = grpo.update(model, optimizer, batch, *both(grpo, batch, args), 1, args)
    assert math.isnan(sums["loss"])
    assert math.isnan(sums["grad_norm"])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_10_a_token_of_weight_0_stays_in_the_metrics():
    """Fault: the mask was read off the weights, so leaving out tokens moved clip_frac and kl."""
    batch = make_batch(grpo)
    args = make_args(grpo, beta=0.04)
    advantages, weights = both(grpo, batch, args)
    _, _, metrics = loss_and_gradient(grpo, drifted(batch), batch, advantages, weights, args)
    weights[:6] = 0.0
    given = drifted(batch), batch, advantages, weights, args
    _, gradient, without = loss_and_gradient(grpo, *given)
    assert without == metrics
    assert not gradient[:6].any()
    assert gradient[6:].any()


def test_11_ratio_is_exactly_1_and_kl_exactly_0_where_all_three_agree():
    batch = make_batch(grpo)
    args = make_args(grpo, beta=1.0)
    given = batch.old_logps, batch, *both(grpo, batch, args), args
    batch.ref_logps = batch.old_logps
    with_kl, gradient, metrics = loss_and_gradient(grpo, *given)
    batch.ref_logps = None
    without_kl, plain, bare = loss_and_gradient(grpo, *given)
    assert metrics["kl"] == 0
    assert metrics["clip_frac"] == 0
    assert "kl" not in bare
    assert torch.equal(with_kl, without_kl)
    assert torch.equal(gradient, plain)
    advantages, weights = both(grpo, batch, args)
    assert torch.equal(gradient, -weights * advantages)  # so the ratio was 1 to the last bit


@pytest.mark.parametrize("difference", [100.0, 1000.0, -100.0])
def test_12_a_far_reference_stays_finite(difference):
    batch = make_batch(grpo)
    args = make_args(grpo, beta=0.04)
    given = batch.old_logps, batch, *both(grpo, batch, args), args
    batch.ref_logps = batch.old_logps.clone()
    batch.ref_logps[0, 0] += difference
    loss, gradient, metrics = loss_and_gradient(grpo, *given)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert metrics["kl"].isfinite()
    assert metrics["kl"] > 1  # seen, not hidden


def test_12_a_near_reference_is_exact():
    """The bound that keeps exp finite is far from anything that training meets."""
    batch = make_batch(grpo)
    args = make_args(grpo, beta=0.04)
    batch.ref_logps = batch.old_logps + 19.0
    given = batch.old_logps, batch, *both(grpo, batch, args), args
    _, _, metrics = loss_and_gradient(grpo, *given)
    torch.testing.assert_close(metrics["kl"].item(), math.exp(19) - 20, rtol=1e-4, atol=0)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_12_a_policy_that_has_moved_by_100_is_finite(advantage):
    """Fault: exp(100) is infinite in float32, and a clipped token's gradient 0 times infinity.

    Beyond e^20 the ratio is constant: there it has no gradient, whatever the advantage.
    """
    one = torch.ones(1, 1)
    args = make_args(grpo)
    given = torch.zeros(1, 1), one_token(-100.0), advantage * one, one, args
    loss, gradient, _ = loss_and_gradient(grpo, *given)
    assert loss.isfinite()
    assert gradient == 0
    given = torch.zeros(1, 1), one_token(-19.0), advantage * one, one, args
    _, gradient, _ = loss_and_gradient(grpo, *given)
    expected = math.exp(19) if advantage < 0 else 0.0  # only a bad one is pushed, and hard
    torch.testing.assert_close(gradient.item(), expected, rtol=1e-4, atol=0)


# --- 13 to 15: the clip, entropy statistics, rewards ---
@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(0.5, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0), (1.5, 1.0, 1.2, 0.0),
     (0.5, -1.0, -0.8, 0.0), (1.0, -1.0, -1.0, -1.0), (1.5, -1.0, -1.5, -1.5)])
def test_13_clip_table(ratio, advantage, objective, slope):
    one = torch.ones(1, 1)
    given = math.log(ratio) * one, one_token(), advantage * one, one, make_args(grpo)
    loss, gradient, metrics = loss_and_gradient(grpo, *given)
    torch.testing.assert_close(-loss.item(), objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(-gradient.item(), slope, rtol=1e-6, atol=0)
    assert metrics["clip_frac"] == (slope == 0)  # where the gradient is cut off


def test_13_clip_low_and_clip_high_are_two_flags():
    batch = grpo.Batch(mask=torch.ones(1, 2) > 0, old_logps=torch.zeros(1, 2))
    logps = torch.tensor([[0.6, 1.35]]).log()
    args = make_args(grpo, clip_low=0.3, clip_high=0.4)  # [0.7, 1.4]: one is out, the other in
    given = logps, batch, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), args
    loss, _, metrics = loss_and_gradient(grpo, *given)
    torch.testing.assert_close(loss, torch.tensor(0.7 - 1.35))
    assert metrics["clip_frac"] == 0.5


def test_13_clip_frac_counts_clipped_unmasked_tokens():
    ratios = torch.tensor([[0.5, 0.5, 1.5, 1.5, 1.0, 9.0, 9.0]])
    advantages = torch.tensor([[-1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0]])  # clipped: first and third
    mask = torch.arange(7)[None] < 5
    batch = grpo.Batch(mask=mask, old_logps=torch.zeros(1, 7))
    given = ratios.log(), batch, advantages, mask / 5, make_args(grpo)
    _, _, metrics = loss_and_gradient(grpo, *given)
    torch.testing.assert_close(metrics["clip_frac"], torch.tensor(2 / 5))


@pytest.mark.parametrize("junk", [1e6, -3.0, math.nan, math.inf])
def test_14_entropy_statistics_never_see_pads(junk):
    """The gate's mean and spread, the progress along a response, the buckets' statistics."""
    args = make_args(ep_grpo, progress_weight=1.0)
    clean = ep_grpo.compute_advantages(make_batch(ep_grpo), args)
    dirty = ep_grpo.compute_advantages(make_batch(ep_grpo, off_mask=junk), args)
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_script
def test_15_rewards_that_are_not_finite_raise(script, bad):
    batch = make_batch(script)
    batch.rewards[1, 2] = bad
    with pytest.raises(BadInput, match="rewards must be .*: see compute_reward"):
        script.compute_advantages(batch, make_args(script))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "1", [1.0]])
def test_15_a_reward_that_is_no_finite_number_ends_the_run(bad, data, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "compute_reward", lambda text, problem, length: bad)
    with pytest.raises(BadInput, match="compute_reward returned .* not a finite number"):
        run(data, tmp_path, "--steps", 1)


@pytest.mark.parametrize("name", ["compute_advantages", "compute_weights"])
def test_a_wrong_shape_is_named_with_both_shapes(name, data, tmp_path, monkeypatch):
    """Fault: a (B, 1) broadcasts, and a (P, G) fails somewhere else, or not at all."""
    monkeypatch.setattr(grpo, name, lambda batch, args: torch.ones(len(batch.mask), 1))
    message = rf"{name} returned .* \(16, 1\).* the mask has shape \(16, \d+\)"
    with pytest.raises(BadInput, match=message):
        run(data, tmp_path, "--steps", 1)
