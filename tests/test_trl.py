"""Advantages, loss and gradient are those of TRL (its own made by tools/make_trl_fixture.py)."""

import json
from pathlib import Path

import pytest
import torch
from conftest import both, loss_and_gradient

import dr_grpo
import ep_grpo
import grpo
import length_alpha

TRL = json.loads(Path(__file__).with_name("trl_fixture.json").read_text())
ENDPOINTS = {  # which scripts, with which flags, compute TRL's loss_type
    "grpo": [
        (grpo, {}),
        (length_alpha, dict(alpha=0.0, scale_rewards=True)),
        (ep_grpo, dict(entropy_gate=False, progress_weight=0.0)),
    ],
    "dr_grpo": [(dr_grpo, {}), (length_alpha, dict(alpha=1.0))],
}
PAIRS = [
    pytest.param(script, flags, case, id=f"{script.__name__} beta {case['beta']}")
    for case in TRL["cases"] for script, flags in ENDPOINTS[case["loss_type"]]
]  # fmt: skip


def assert_close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("script, flags, case", PAIRS)
def test_advantages_loss_and_gradient_are_those_of_trl(script, flags, case):
    args = script.Args(
        max_new_tokens=TRL["max_new_tokens"], beta=case["beta"], clip_low=TRL["clip_low"],
        clip_high=TRL["clip_high"], **flags)
    logps, old_logps, ref_logps = (
        torch.tensor(TRL[name]) for name in ("logps", "old_logps", "ref_logps"))
    batch = script.Batch(
        rewards=torch.tensor(TRL["rewards"]).view(-1, TRL["group_size"]),
        mask=torch.arange(logps.shape[1]) < torch.tensor(TRL["lengths"])[:, None],
        old_logps=old_logps, ref_logps=ref_logps, entropies=-logps)
    advantages, weights = both(script, batch, args)
    loss, gradient, metrics = loss_and_gradient(script, logps, batch, advantages, weights, args)
    theirs = torch.tensor(case["advantages"])[:, None]
    assert_close(advantages, theirs.where(batch.mask, 0.0))
    assert_close(loss, case["loss"])
    assert_close(gradient, case["gradient"])
    assert_close(metrics["clip_frac"], case["clip_frac"])
    if case["beta"]:
        assert_close(metrics["kl"], case["kl"])


def test_the_fixture_is_no_easy_case():
    """It clips on both sides, has a group of equal rewards, and responses shorter than C."""
    ratios = (torch.tensor(TRL["logps"]) - torch.tensor(TRL["old_logps"])).exp()
    assert (ratios < 1 - TRL["clip_low"]).any()
    assert (ratios > 1 + TRL["clip_high"]).any()
    assert 0.1 < TRL["cases"][0]["clip_frac"] < 0.5
    assert max(TRL["lengths"]) < TRL["max_new_tokens"]
    assert len(set(TRL["lengths"])) > 3
    assert len(set(TRL["rewards"][-TRL["group_size"] :])) == 1
    settings = [(case["loss_type"], case["scale_rewards"], case["beta"]) for case in TRL["cases"]]
    losses = [("grpo", "group"), ("dr_grpo", "none")]
    assert settings == [(*loss, beta) for loss in losses for beta in (0.0, 0.04)]
