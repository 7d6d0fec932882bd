"""The exercises of docs/exercises: each diff still fits grpo.py, and what it makes gives numbers worked out by hand.

    python -m pytest tests/test_exercises.py -k rgra                       the solution, docs/exercises/rgra.diff
    EXERCISE=my_rgra.py python -m pytest tests/test_exercises.py -k rgra   your script, by the same tests
"""

import ast
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import grpo

ROOT = Path(__file__).parent.parent
DIFFS = ROOT / "docs" / "exercises"
TOUCHED = {  # what each solution changes in grpo.py
    "rgra": {"policy_loss"},
    "raft": {"compute_advantages"},
    "reinforce_rej": {"compute_advantages"},
    "corpo": {"Args", "compute_advantages"},
    "gspo": {"policy_loss"},
    "k2": {"policy_loss"},
}
YOURS = os.environ.get("EXERCISE")
TOOLS = [tool for tool in ("git", "patch") if shutil.which(tool)]  # git first, since it takes no line that differs
LN2 = math.log(2)


def patched(name, tool=TOOLS[0]):
    """The text of grpo.py after docs/exercises/NAME.diff, made in a folder of its own by the tool named."""
    diff = str(DIFFS / f"{name}.diff")
    command = {"git": ["git", "apply", "-p0", diff], "patch": ["patch", "-o", "new.py", "grpo.py", diff]}[tool]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "grpo.py", folder)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"docs/exercises/{name}.diff no longer fits grpo.py: {done.stdout}{done.stderr}Solve it by hand, then make "
            "the diff anew: diff -u --label grpo.py --label grpo.py grpo.py SOLUTION.py"
        )
        return Path(folder, "grpo.py" if tool == "git" else "new.py").read_text()


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(NAME) is the solution as a module, or the script that EXERCISE names."""

    @functools.cache
    def load(name):
        path = Path(YOURS or tmp_path_factory.mktemp("exercises") / f"{name}.py").resolve()
        if not YOURS:
            path.write_text(patched(name))
        spec = importlib.util.spec_from_file_location(f"exercise_{name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # the argument parser looks it up there
        spec.loader.exec_module(module)
        return module

    return load


def per_response(script, rewards, **flags):
    """compute_advantages on groups of rewards: the one number of every response, (P, G)."""
    rewards = torch.tensor(rewards)
    mask = torch.arange(3) < torch.arange(rewards.numel())[:, None] % 3 + 1  # lengths 1, 2, 3, 1, 2, 3, ...
    advantages = script.compute_advantages(script.Batch(rewards, mask), script.Args(**flags))
    assert advantages.shape == mask.shape and advantages.dtype == torch.float32
    assert (advantages[~mask] == 0).all(), "an advantage off the mask"
    assert (advantages == torch.where(mask, advantages[:, :1], 0.0)).all(), "not the same for every token of a response"
    return advantages[:, 0].view(rewards.shape)


def loss_and_gradient(script, logps, old_logps, advantages, mask, ref_logps=None, **flags):
    """policy_loss with GRPO's weights on small tables; what stands under the mask is NaN and must not be seen."""
    mask = torch.tensor(mask) == 1
    advantages = torch.where(mask, torch.tensor(advantages).float().view(-1, 1), 0.0)
    logps, old_logps = (torch.where(mask, torch.tensor(x), math.nan) for x in (logps, old_logps))
    ref_logps = None if ref_logps is None else torch.where(mask, torch.tensor(ref_logps), math.nan)
    weights = grpo.compute_weights(grpo.Batch(None, mask), None)
    args = script.Args(**flags)
    loss, metrics = script.policy_loss(logps.requires_grad_(), old_logps, ref_logps, advantages, weights, args)
    loss.backward()
    return loss.item(), logps.grad.tolist(), {key: float(value) for key, value in metrics.items()}


def close(numbers):
    return pytest.approx(numbers, abs=2e-6)


# Two responses in a step, of two tokens and of one: GRPO's weights 1 / L / B are 1/4, 1/4 and 1/2.
MASK = [[1, 1], [1, 0]]
LOGPS = [[-LN2, -2 * LN2], [-LN2, 0.0]]  # probabilities 1/2 and 1/4, and 1/2


# --- the diffs ---
@pytest.mark.skipif(YOURS is not None, reason="EXERCISE names a script: no diff is looked at")
@pytest.mark.parametrize("name", TOUCHED)
def test_diff_fits_grpo_and_changes_what_it_should(name):
    def parts(text):  # the text of every class and function, comments apart
        return {x.name: ast.unparse(x) for x in ast.parse(text).body if isinstance(x, (ast.FunctionDef, ast.ClassDef))}

    text, before = patched(name), parts((ROOT / "grpo.py").read_text())
    assert parts(text).keys() == before.keys()
    assert {part for part, code in parts(text).items() if code != before[part]} == TOUCHED[name]
    assert max(map(len, text.splitlines())) <= 120
    assert all(patched(name, tool) == text for tool in TOOLS)


@pytest.mark.skipif(YOURS is not None, reason="EXERCISE names a script: no diff is looked at")
def test_every_exercise_is_in_the_readme_and_has_a_test():
    assert {path.stem for path in DIFFS.glob("*.diff")} == set(TOUCHED)
    readme = (DIFFS / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.diff\)", readme)) == set(TOUCHED)
    assert set(re.findall(r"-k (\w+)", readme)) == set(TOUCHED)
    for name in TOUCHED:
        assert f"def test_{name}_" in Path(__file__).read_text()


# --- 1: RGRA ---
def test_rgra_first_update_has_the_gradient_of_grpo_and_another_loss(load):
    # - (1/4 (-ln 2) + 1/4 (-2 ln 2) - 1/2 (-ln 2)) = 3/4 ln 2 - 1/2 ln 2; GRPO: - (1/4 + 1/4 - 1/2)
    gradient = [[-0.25, -0.25], [0.5, 0.0]]  # - W A
    loss, grad, metrics = loss_and_gradient(load("rgra"), LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.25 * LN2) and sum(grad, []) == close(sum(gradient, []))
    loss, grad, _ = loss_and_gradient(grpo, LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.0) and sum(grad, []) == close(sum(gradient, []))
    assert metrics.get("clip_frac", 0.0) == 0.0 and "kl" not in metrics


def test_rgra_later_updates_have_neither_ratio_nor_clip(load):
    old = [[x - math.log(1.5) for x in row] for row in LOGPS]  # every ratio is 1.5
    loss, grad, _ = loss_and_gradient(load("rgra"), LOGPS, old, [1, -1], MASK)
    assert loss == close(0.25 * LN2) and sum(grad, []) == close([-0.25, -0.25, 0.5, 0.0])
    _, grad, _ = loss_and_gradient(grpo, LOGPS, old, [1, -1], MASK)
    assert sum(grad, []) == close([0.0, 0.0, 0.75, 0.0])  # the first response is clipped, the second counts 1.5 times


def test_rgra_keeps_the_kl_penalty(load):
    ref = [[x + LN2 for x in row] for row in LOGPS]  # k3 = 2 - ln 2 - 1 for every token, and the weights add up to 1
    loss, grad, metrics = loss_and_gradient(load("rgra"), LOGPS, LOGPS, [1, -1], MASK, ref, beta=0.1)
    assert loss == close(0.25 * LN2 + 0.1 * (1 - LN2)) and metrics["kl"] == close(1 - LN2)
    assert sum(grad, []) == close([-0.25 - 0.025, -0.25 - 0.025, 0.5 - 0.05, 0.0])  # dk3/dlogp = 1 - 2


def test_rgra_trains_as_grpo_does_with_one_update_a_rollout(load, data, tmp_path):
    flags = "--steps 2 --prompts_per_step 4 --group_size 4 --max_new_tokens 24 --learning_rate 3e-4 --warmup_steps 0"
    records = []
    for script, folder in (grpo, "grpo"), (load("rgra"), "rgra"):
        where = ["--model", str(ROOT / "tests/tiny"), "--dataset", f"{data}/train.jsonl", "--device", "cpu"]
        args = [*flags.split(), *where, "--instruction", "", "--output_dir", str(tmp_path / folder)]
        script.main(script.parse_args(args))
        records.append([json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()])
    for reference, yours in zip(*records, strict=True):
        assert 0 < reference["reward"] < 1
        assert (yours["reward"], yours["tokens"]) == (reference["reward"], reference["tokens"])
        assert yours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert abs(reference["loss"]) < 1e-5 < abs(yours["loss"])


# --- 2: RAFT and Reinforce-Rej ---
GROUPS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def test_raft_learns_from_every_right_response_and_from_no_other(load):
    advantages = per_response(load("raft"), GROUPS)
    assert advantages.tolist() == [[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def test_raft_gradient_is_that_of_imitation(load):
    advantages = per_response(load("raft"), [[1.0, 0.0]]).view(-1)
    loss, grad, _ = loss_and_gradient(load("raft"), LOGPS, LOGPS, advantages.tolist(), MASK)
    assert loss == close(-0.5)  # one of two is right, and the ratio is 1
    assert sum(grad, []) == close([-0.25, -0.25, 0.0, 0.0])  # of - mean log p over the right one's tokens, / B


def test_reinforce_rej_drops_the_groups_without_variance_and_takes_no_baseline(load):
    advantages = per_response(load("reinforce_rej"), GROUPS)
    assert advantages.tolist() == [[1, -1, -1, 1], [1, 1, 1, -1], [0, 0, 0, 0], [0, 0, 0, 0]]


# --- 3: CoRPO ---
def test_corpo_baseline_is_the_mean_above_the_threshold_and_the_threshold_below(load):
    script = load("corpo")
    assert script.Args().threshold == 0.5
    # means 1/2, 3/4, 0, 1 against 1/2: the all-wrong group is no longer silent, the all-right one still is
    expected = [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75], [-0.5] * 4, [0.0] * 4]
    assert per_response(script, GROUPS).tolist() == expected
    assert per_response(script, [[1.0, 0.0, 0.0, 0.0]]).tolist() == [[0.5, -0.5, -0.5, -0.5]]  # the mean is 1/4
    # the flag is read: the baselines are 3/4 and 3/4, and 1 for the last
    expected = [[0.25, -0.75, -0.75, 0.25], [0.25, 0.25, 0.25, -0.75], [-0.75] * 4, [0.0] * 4]
    assert per_response(script, GROUPS, threshold=0.75).tolist() == expected


def test_corpo_never_reinforces_a_failure_where_grpo_does(load):
    rewards = [[0.0, 0.1, 0.2, 0.3]]  # partial credit, and all of them failures
    assert per_response(load("corpo"), rewards).tolist() == [close([-0.5, -0.4, -0.3, -0.2])]
    # GRPO: the mean is 0.15, the std sqrt(0.05 / 3) = 0.1291, with 1e-4 0.1292
    assert per_response(grpo, rewards).tolist() == [pytest.approx([-1.161, -0.387, 0.387, 1.161], abs=1e-3)]


def test_corpo_equal_rewards_above_the_threshold_give_exactly_zero(load):
    assert (per_response(load("corpo"), [[0.9] * 12]) == 0).all()  # the float mean of twelve times 0.9 is not 0.9


# --- outlook: GSPO's ratio, another KL estimator ---
def test_gspo_ratio_is_the_geometric_mean_of_a_response(load):
    old = [[LOGPS[0][0] - 2 * LN2, LOGPS[0][1]], [LOGPS[1][0] - math.log(1.1), 0.0]]  # token ratios 4, 1 and 1.1
    loss, grad, metrics = loss_and_gradient(load("gspo"), LOGPS, old, [-1, 1], MASK)
    # Ratios sqrt(4 * 1) = 2 and 1.1. A negative advantage is not clipped above: - (-1 * 2 + 1 * 1.1) / 2
    assert loss == close(0.45)
    # d ratio / d logp = ratio / L: the first 2 / 2 / 2 for either token, the second - 1.1 / 2
    assert sum(grad, []) == close([0.5, 0.5, -0.55, 0.0]) and metrics["clip_frac"] == 0
    # GRPO's ratios are 4, 1 and 1.1
    loss, grad, _ = loss_and_gradient(grpo, LOGPS, old, [-1, 1], MASK)
    assert loss == close(0.25 * 4 + 0.25 * 1 - 0.5 * 1.1) and sum(grad, []) == close([1.0, 0.25, -0.55, 0.0])


def test_gspo_clips_whole_responses(load):
    old = [[LOGPS[0][0] - 2 * LN2, LOGPS[0][1]], [LOGPS[1][0] - math.log(1.1), 0.0]]
    loss, grad, metrics = loss_and_gradient(load("gspo"), LOGPS, old, [1, -1], MASK)
    assert loss == close(-(1.2 - 1.1) / 2)  # 2 is cut to 1.2
    assert sum(grad, []) == close([0.0, 0.0, 0.55, 0.0]) and metrics["clip_frac"] == close(2 / 3)  # two of three tokens


def test_gspo_first_update_is_grpo(load):
    loss, grad, _ = loss_and_gradient(load("gspo"), LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.0) and sum(grad, []) == close([-0.25, -0.25, 0.5, 0.0])


def test_k2_value_and_gradient(load):
    ref = [[LOGPS[0][0] + LN2, LOGPS[0][1] - 2 * LN2], [LOGPS[1][0], 0.0]]  # ref - logp: ln 2, -2 ln 2 and 0
    loss, grad, metrics = loss_and_gradient(load("k2"), LOGPS, LOGPS, [0, 0], MASK, ref, beta=0.1)
    # squares / 2: 1/2, 2 and 0 (ln 2)^2, weighed 1/4, 1/4, 1/2; the metric is a plain mean over the three tokens
    assert loss == close(0.1 * 0.625 * LN2**2) and metrics["kl"] == close(2.5 / 3 * LN2**2)
    assert sum(grad, []) == close([-0.025 * LN2, 0.05 * LN2, 0.0, 0.0])  # beta W (logp - ref)


def test_k2_mean_gradient_is_that_of_the_kl(load):
    """Three tokens that exist, each a response of its own, weighed by its probability: an expectation without draws."""
    q, script = torch.tensor([[0.2], [0.3], [0.5]]), load("k2")

    def gradient(loss):
        logits = torch.tensor([0.7, -0.4, 0.1], requires_grad=True)
        loss(logits.log_softmax(0)[:, None]).backward()  # (3, 1)
        return logits.grad.tolist()

    def penalty(module):
        zeros, args = torch.zeros(3, 1), module.Args(beta=1.0)
        return lambda logp: module.policy_loss(logp, logp.detach(), q.log(), zeros, logp.detach().exp(), args)[0]

    def kl(logp):  # KL(policy || reference)
        return (logp.exp() * (logp - q.log())).sum()

    def other_kl(logp):  # KL(reference || policy)
        return (q * (q.log() - logp)).sum()

    assert gradient(penalty(script)) == close(gradient(kl))
    assert gradient(penalty(grpo)) == close(gradient(other_kl))
    assert gradient(kl) != pytest.approx(gradient(other_kl), rel=0.1)
