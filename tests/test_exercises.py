"""The exercises of docs/exercises: their diffs fit grpo.py, and give numbers worked out by hand.

    python -m pytest tests/test_exercises.py -k rgra                       docs/exercises/rgra.diff
    EXERCISE=my_rgra.py python -m pytest tests/test_exercises.py -k rgra   your script, same tests
"""

import ast
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import conftest
import pytest
import torch
from conftest import ROOT, both, parse, run, training_lines

import common
import dr_grpo
import grpo

DIFFS = ROOT / "docs" / "exercises"
TOUCHED = {  # what each solution changes in grpo.py, or adds to it
    "rgra": {"policy_loss"},
    "raft": {"compute_advantages"},
    "reinforce_rej": {"compute_advantages"},
    "corpo": {"Args", "compute_advantages"},
    "rloo": {"compute_advantages", "compute_weights"},
    "dapo": {"Args", "compute_weights", "main", "sample_groups", "join", "take"},
    "countdown": {"OPERATIONS", "value_of", "compute_reward", "load_problems"},
    "length_bonus": {"compute_reward"},
    "top_p": {"Args", "sample", "rollout"},
    "cosine": {"learning_rate"},
    "gspo": {"policy_loss"},
    "k2": {"policy_loss"},
}
YOURS = os.environ.get("EXERCISE")
of_the_diffs = pytest.mark.skipif(YOURS is not None, reason="EXERCISE names a script")
# git first, since it accepts no line that differs.
TOOLS = [tool for tool in ("git", "patch") if shutil.which(tool)]
LN2 = math.log(2)


def patched(name, tool=TOOLS[0]):
    """The text of grpo.py after docs/exercises/<name>.diff, by the tool named."""
    diff = str(DIFFS / f"{name}.diff")
    command = ["git", "apply", "-p0", diff]
    if tool == "patch":
        command = ["patch", "grpo.py", diff]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "grpo.py", folder)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"docs/exercises/{name}.diff no longer fits grpo.py: {done.stdout}{done.stderr}"
            "Solve it by hand, then make the diff anew: "
            "diff -u --label grpo.py --label grpo.py grpo.py SOLUTION.py")
        return Path(folder, "grpo.py").read_text()


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(name) is the solution as a module, or the script that EXERCISE names."""

    @functools.cache
    def load(name):
        folder = tmp_path_factory.mktemp("exercises")
        path = Path(YOURS or folder / f"{name}.py").resolve()
        if not YOURS:
            path.write_text(patched(name))
        spec = importlib.util.spec_from_file_location(f"exercise_{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look it up there
        spec.loader.exec_module(module)
        module.TINY = grpo.TINY  # also where the script stands in another folder
        return module

    return load


def per_response(script, rewards, **flags):
    """compute_advantages on groups of rewards: the one number of every response, (P, G)."""
    rewards = torch.tensor(rewards)
    lengths = torch.arange(rewards.numel())[:, None] % 3 + 1  # 1, 2, 3, 1, 2, 3, ...
    mask = torch.arange(3) < lengths
    batch = script.Batch(rewards=rewards, mask=mask)
    advantages = script.compute_advantages(batch, script.Args(**flags))
    assert advantages.shape == mask.shape
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, advantages[:, :1].where(mask, 0.0)), "one per response"
    return advantages[:, 0].view(rewards.shape)


def loss_and_gradient(script, logps, old_logps, advantages, mask, ref_logps=None, **flags):
    """policy_loss with GRPO's weights on small tables; off the mask stands NaN, not to be seen."""
    mask = torch.tensor(mask) == 1
    advantages = torch.tensor(advantages).float().view(-1, 1).where(mask, 0.0)
    batch = script.Batch(mask=mask, old_logps=torch.tensor(old_logps).where(mask, math.nan))
    if ref_logps is not None:
        batch.ref_logps = torch.tensor(ref_logps).where(mask, math.nan)
    logps = torch.tensor(logps).where(mask, math.nan)
    weights = grpo.compute_weights(batch, None)
    args = script.Args(**flags)
    loss, gradient, metrics = conftest.loss_and_gradient(
        script, logps, batch, advantages, weights, args)
    numbers = {name: float(value) for name, value in metrics.items()}
    return loss.item(), gradient.flatten().tolist(), numbers


def close(numbers):
    return pytest.approx(numbers, abs=2e-6)


# Two responses, of two tokens and of one: GRPO's weights 1 / L / B are 1/4, 1/4 and 1/2.
MASK = [[1, 1], [1, 0]]
LOGPS = [[-LN2, -2 * LN2], [-LN2, 0.0]]  # probabilities 1/2 and 1/4, and 1/2
GROUPS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4, [1.0] * 4]


# --- the diffs ---
@of_the_diffs
@pytest.mark.parametrize("name", TOUCHED)
def test_diff_fits_grpo_and_changes_what_it_should(name):
    def parts(text):
        """The code of every class, function and table by its name; imports and comments aside."""
        found = {}
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name] = ast.unparse(node)
            elif isinstance(node, ast.Assign):
                found[node.targets[0].id] = ast.unparse(node)
        return found

    text = patched(name)
    before = parts((ROOT / "grpo.py").read_text())
    after = parts(text)
    assert before.keys() <= after.keys()
    assert {part for part in after if after[part] != before.get(part)} == TOUCHED[name]
    assert max(map(len, text.splitlines())) <= 100
    assert all(patched(name, tool) == text for tool in TOOLS)


@of_the_diffs
def test_every_exercise_is_in_the_readme_and_has_a_test():
    assert {path.stem for path in DIFFS.glob("*.diff")} == set(TOUCHED)
    readme = (DIFFS / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.diff\)", readme)) == set(TOUCHED)
    assert set(re.findall(r"-k (\w+)", readme)) == set(TOUCHED)
    for name in TOUCHED:
        assert any(test.startswith(f"test_{name}_") for test in globals())


# --- RGRA ---
def test_rgra_first_update_has_the_gradient_of_grpo_and_another_loss(load):
    # - (1/4 (-ln 2) + 1/4 (-2 ln 2) - 1/2 (-ln 2)) = 3/4 ln 2 - 1/2 ln 2; GRPO: -1/4 - 1/4 + 1/2
    expected = close([-0.25, -0.25, 0.5, 0.0])  # - W A
    loss, gradient, metrics = loss_and_gradient(load("rgra"), LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.25 * LN2)
    assert gradient == expected
    assert metrics.get("clip_frac", 0.0) == 0.0
    assert "kl" not in metrics
    loss, gradient, _ = loss_and_gradient(grpo, LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.0)
    assert gradient == expected


def test_rgra_later_updates_have_neither_ratio_nor_clip(load):
    old = [[x - math.log(1.5) for x in row] for row in LOGPS]  # every ratio is 1.5
    loss, gradient, _ = loss_and_gradient(load("rgra"), LOGPS, old, [1, -1], MASK)
    assert loss == close(0.25 * LN2)
    assert gradient == close([-0.25, -0.25, 0.5, 0.0])
    _, gradient, _ = loss_and_gradient(grpo, LOGPS, old, [1, -1], MASK)
    assert gradient == close([0.0, 0.0, 0.75, 0.0])  # the first is clipped, the second counts 1.5


def test_rgra_keeps_the_kl_penalty(load):
    ref = [[x + LN2 for x in row] for row in LOGPS]  # k3 = 2 - ln 2 - 1 for every token
    loss, gradient, metrics = loss_and_gradient(
        load("rgra"), LOGPS, LOGPS, [1, -1], MASK, ref, beta=0.1)
    assert loss == close(0.25 * LN2 + 0.1 * (1 - LN2))  # the weights sum to 1
    assert metrics["kl"] == close(1 - LN2)
    # d k3 / d logp = 1 - 2
    assert gradient == close([-0.25 - 0.025, -0.25 - 0.025, 0.5 - 0.05, 0.0])


def test_rgra_trains_as_grpo_does_with_one_update_per_rollout(load, data, tmp_path):
    logs = []
    for script in (grpo, load("rgra")):
        folder = tmp_path / script.__name__
        run(data, folder, "--steps", 2, script=script)
        logs.append(training_lines(folder))
    for theirs, yours in zip(*logs, strict=True):
        assert 0 < theirs["reward"] < 1
        assert yours["reward"] == theirs["reward"]
        assert yours["tokens"] == theirs["tokens"]
        assert yours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert abs(theirs["loss"]) < 1e-5 < abs(yours["loss"])


# --- RAFT and Reinforce-Rej ---
def test_raft_learns_from_every_right_response_and_from_no_other(load):
    expected = [[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert per_response(load("raft"), GROUPS).tolist() == expected


def test_raft_gradient_is_that_of_imitation(load):
    advantages = per_response(load("raft"), [[1.0, 0.0]]).flatten().tolist()
    loss, gradient, _ = loss_and_gradient(load("raft"), LOGPS, LOGPS, advantages, MASK)
    assert loss == close(-0.5)  # one of two is right, and the ratio is 1
    assert gradient == close([-0.25, -0.25, 0.0, 0.0])  # of - mean logp of the right one, / B


def test_reinforce_rej_drops_zero_variance_groups_and_takes_no_baseline(load):
    expected = [[1, -1, -1, 1], [1, 1, 1, -1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert per_response(load("reinforce_rej"), GROUPS).tolist() == expected


# --- CoRPO ---
def test_corpo_baseline_is_never_below_the_threshold(load):
    script = load("corpo")
    assert script.Args().threshold == 0.5
    # Means 1/2, 3/4, 0 and 1 against 1/2: an all-wrong group counts, an all-right one does not.
    expected = [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75], [-0.5] * 4, [0.0] * 4]
    assert per_response(script, GROUPS).tolist() == expected
    one = [[1.0, 0.0, 0.0, 0.0]]  # the mean is 1/4
    assert per_response(script, one).tolist() == [[0.5, -0.5, -0.5, -0.5]]
    # The flag is read. Baselines are 3/4 in the first three groups, 1 in the last.
    expected = [[0.25, -0.75, -0.75, 0.25], [0.25, 0.25, 0.25, -0.75], [-0.75] * 4, [0.0] * 4]
    assert per_response(script, GROUPS, threshold=0.75).tolist() == expected


def test_corpo_never_reinforces_a_failure_where_grpo_does(load):
    rewards = [[0.0, 0.1, 0.2, 0.3]]  # partial credit, and all of them failures
    assert per_response(load("corpo"), rewards).tolist() == [close([-0.5, -0.4, -0.3, -0.2])]
    # GRPO: the mean is 0.15, the std sqrt(0.05 / 3) = 0.1291, with 1e-4 0.1292
    expected = pytest.approx([-1.161, -0.387, 0.387, 1.161], abs=1e-3)
    assert per_response(grpo, rewards).tolist() == [expected]


def test_corpo_equal_rewards_above_the_threshold_give_exactly_zero(load):
    # The float32 mean of twelve 0.9s is not 0.9.
    assert (per_response(load("corpo"), [[0.9] * 12]) == 0).all()


# --- RLOO ---
def test_rloo_baseline_is_the_mean_of_the_others(load):
    # 1 0 0 1: a right one is compared with 0, 0, 1, a wrong one with 1, 0, 1.
    expected = [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [1 / 3, 1 / 3, 1 / 3, -1.0], [0.0] * 4, [0.0] * 4]
    ours = per_response(load("rloo"), GROUPS)
    assert ours.flatten().tolist() == close(sum(expected, []))
    assert (per_response(load("rloo"), [[0.1] * 12]) == 0).all()


def test_rloo_is_dr_grpo_times_a_constant(load):
    """G / (G - 1): r - (sum - r) / (G - 1) = (r - mean) G / (G - 1)."""
    batch = conftest.make_batch(dr_grpo, "graded")
    ours = both(load("rloo"), batch, conftest.make_args(load("rloo")))
    theirs = both(dr_grpo, batch, conftest.make_args(dr_grpo))
    torch.testing.assert_close(ours[0], theirs[0] * 4 / 3)
    assert torch.equal(ours[1], theirs[1])


def test_rloo_is_unbiased(load):
    """Over all groups of three from a policy with three responses, the step is the true gradient.

    The group's mean falls short of it by 1 - 1/G, because a response is part of its own baseline.
    """
    script = load("rloo")
    theta = torch.tensor([0.7, -0.4, 0.1], requires_grad=True)
    logps = theta.log_softmax(0)
    reward = torch.tensor([1.0, 0.0, 0.3])
    groups = torch.tensor(list(itertools.product(range(3), repeat=3)))  # (27, 3)
    batch = script.Batch(rewards=reward[groups], mask=torch.ones(81, 1) > 0)
    advantages, weights = both(script, batch, script.Args(max_new_tokens=1))
    chance = logps.detach()[groups].sum(1).exp()  # (27,)
    weights = weights * (27 * chance).repeat_interleave(3)[:, None]
    ours = torch.autograd.grad((weights * advantages * logps[groups].view(-1, 1)).sum(), theta)
    true = torch.autograd.grad((theta.softmax(0) * reward).sum(), theta)
    torch.testing.assert_close(ours, true)


# --- DAPO ---
def rollout_of(script, lengths, prompts, rewards):
    """A rewarded rollout: prompts of these lengths, responses 10, 11, 12, ... of these lengths."""
    G = len(lengths) // len(prompts)
    S = max(prompts)
    T = max(lengths)
    own = torch.tensor(prompts).repeat_interleave(G)[:, None]  # (B, 1)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    prompt_mask = torch.arange(S) >= S - own
    responses = (10 + torch.arange(T)).where(mask, 99)  # 99 is the padding
    return script.Batch(
        input_ids=torch.cat([torch.ones(len(mask), S).long().where(prompt_mask, 99), responses], 1),
        attention_mask=torch.cat([prompt_mask, mask], 1).long(), mask=mask,
        texts=[f"{T} {i}" for i in range(len(mask))], finished=mask[:, -1],
        sampled_logps=torch.where(mask, -1.0 * T, math.nan), rewards=torch.tensor(rewards))


def rows_of(batch):
    """Each row of a rollout without its padding."""
    S = batch.input_ids.shape[1] - batch.mask.shape[1]
    rows = []
    for i, text in enumerate(batch.texts):
        used = batch.attention_mask[i] == 1
        assert torch.equal(used[S:], batch.mask[i])
        ids = batch.input_ids[i][used].tolist()
        logps = batch.sampled_logps[i][batch.mask[i]].tolist()
        rows.append((text, ids, logps, batch.finished[i].item()))
    return rows


def test_dapo_join_pads_prompts_on_the_left_and_responses_on_the_right(load):
    script = load("dapo")
    wide = rollout_of(script, [3, 1], [5], [[1.0, 0.0]])  # S = 5, T = 3
    tall = rollout_of(script, [2, 6, 4, 4], [2, 3], [[0.0, 0.0], [0.0, 1.0]])  # S = 3, T = 6
    for first, second in (wide, tall), (tall, wide):
        joined = script.join(first, second)
        assert rows_of(joined) == rows_of(first) + rows_of(second)
        assert joined.input_ids.shape == joined.attention_mask.shape == (6, 5 + 6)
        assert joined.mask.shape == joined.sampled_logps.shape == (6, 6)
        assert joined.mask.dtype == torch.bool
        assert torch.equal(joined.rewards, torch.cat([first.rewards, second.rewards]))


def test_dapo_gives_every_token_of_the_step_one_weight(load):
    script = load("dapo")
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]]) > 0
    weights = script.compute_weights(script.Batch(mask=mask), script.Args())
    assert weights.tolist() == [[0.25, 0, 0], [0.25, 0.25, 0.25]]
    empty = script.Batch(mask=torch.zeros(2, 3) > 0)
    assert not script.compute_weights(empty, script.Args()).any()
    assert (script.Args().clip_low, script.Args().clip_high) == (0.2, 0.28)


def dapo_run(script, data, folder, monkeypatch, usable, flags):
    """Two steps in which only problems with usable(question) have groups with variance.

    Returns the batches that were trained on and the places that were drawn.
    """
    places = []
    batches = []
    counts = Counter()

    def reward(text, problem, length):
        counts[problem["question"]] += 1
        return float(usable(problem["question"]) and counts[problem["question"]] % 2)

    def problems_at(problems, chosen, args):
        places.append(list(chosen))
        return grpo.problems_at(problems, chosen, args)

    def compute_advantages(batch, args):
        batches.append(batch)
        return grpo.compute_advantages(batch, args)

    monkeypatch.setattr(script, "compute_reward", reward)
    monkeypatch.setattr(script, "problems_at", problems_at)
    monkeypatch.setattr(script, "compute_advantages", compute_advantages)
    flags = ["--steps", 2, "--eval_problems", 1, "--eval_samples", 1, *flags]
    run(data, folder, *flags, script=script)
    return batches, places


def test_dapo_samples_until_p_groups_have_variance(load, data, tmp_path, monkeypatch):
    def usable(question):
        return question[0] in "01234"  # about half of them

    script = load("dapo")
    batches, places = dapo_run(script, data, tmp_path, monkeypatch, usable, ["--max_tries", 20])
    tokenizer = common.load_model(grpo.TINY_DIR, "cpu")[1]
    for batch in batches:
        assert batch.rewards.shape == (4, 4)
        assert (batch.rewards.amax(1) > batch.rewards.amin(1)).all()
        prompts = []
        for (text, ids, _, _), length in zip(rows_of(batch), batch.mask.sum(1).tolist()):
            prompts.append(tokenizer.decode(ids[:-length]))
            assert text == tokenizer.decode(ids[-length:], skip_special_tokens=True)
        assert len(set(prompts)) == 4
        assert prompts == sorted(prompts, key=prompts.index)  # four rows each, side by side
        assert all(usable(re.search(r"\d", prompt)[0]) for prompt in prompts)
    assert 2 < len(places) < 20
    flat = sum(places, [])
    assert len(set(flat)) == len(flat)  # no prompt is drawn twice
    assert all(line["degenerate_frac"] == 0 for line in training_lines(tmp_path))


def test_dapo_gives_up_after_max_tries(load, data, tmp_path, monkeypatch):
    flags = ["--max_tries", 3]
    script = load("dapo")
    batches, places = dapo_run(script, data, tmp_path, monkeypatch, lambda question: False, flags)
    assert len(places) == 2 * 3
    flat = sum(places, [])
    assert len(set(flat)) == len(flat)
    assert all(batch.rewards.shape == (4, 4) for batch in batches)
    assert all(line["degenerate_frac"] == 1 for line in training_lines(tmp_path))


# --- Countdown ---
@pytest.mark.parametrize("answer, nums, target, expected", [
    ("(3+5)*2", [2, 3, 5], 16, 1.0),
    ("2 * (5 + 3)", [3, 5, 2], 16, 1.0),
    ("3+5*2", [2, 3, 5], 16, 0.0),  # 13
    ("8/(3-8/3)", [8, 3, 8, 3], 24, 1.0),  # exact: in floating point it is 23.99999999999999
    ("4-3-2-1", [1, 2, 3, 4], -2, 1.0),
    ("(3+5)*2", [2, 3, 5, 7], 16, 0.0),  # 7 is left out
    ("(3+5)*2+3-3", [2, 3, 5], 16, 0.0),  # 3 is used three times
    ("3+3", [3, 3], 6, 1.0),
    ("8+8", [2, 3, 5], 16, 0.0),
    ("16", [2, 3, 5], 16, 0.0),
    ("(3+5)*2=16", [2, 3, 5], 16, 0.0),
    ("2**4", [2, 4], 16, 0.0),  # another operation
    ("33//2", [33, 2], 16, 0.0),
    ("-2+18", [2, 18], 16, 0.0),
    ("16/(1-1)", [16, 1, 1], 16, 0.0),  # division by zero
    ("(3+5", [3, 5], 8, 0.0),
    ("3 5", [3, 5], 8, 0.0),
    ("", [3, 5], 8, 0.0),
    ("3,5", [3, 5], 8, 0.0),
    ("0x10", [16], 16, 0.0),
    ("1_6", [16], 16, 0.0),
    ("３+5", [3, 5], 8, 0.0),  # a wide digit
    ("__import__('os').getpid()", [3, 5], 8, 0.0),
    ("9**9**9**9", [9, 9, 9, 9], 9, 0.0),
    ("(" * 5000 + "3+5" + ")" * 5000, [3, 5], 8, 0.0),
    ("3+5" + "+0" * 100_000, [3, 5], 8, 0.0),
])  # fmt: skip
def test_countdown_reward(answer, nums, target, expected, load):
    problem = {"nums": nums, "target": target, "question": "", "answer": None}
    reward = load("countdown").compute_reward
    assert reward(rf"First \boxed{{1}}, so \boxed{{{answer}}}.", problem, 9) == expected
    assert reward(answer, problem, 9) == 0.0  # no box


def make_problems(folder):
    command = [sys.executable, DIFFS / "make_countdown.py", folder]
    subprocess.run(command, check=True)
    texts = [(folder / f"{split}.jsonl").read_text() for split in ("train", "test")]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def solutions(values):
    """All values of (value, expression) pairs combined in every order."""
    if len(values) == 1:
        yield values[0]
    for (i, a), (j, b) in itertools.permutations(enumerate(values), 2):
        rest = [value for k, value in enumerate(values) if k not in (i, j)]
        for sign in "+-*/":
            yield from solutions([*rest, f"({a}{sign}{b})"])


def test_countdown_problems_have_solutions_and_are_all_different(load, tmp_path):
    train, test = make_problems(tmp_path)
    assert (len(train), len(test)) == (2000, 200)
    keys = {(tuple(sorted(row["nums"])), row["target"]) for row in train + test}
    assert len(keys) == 2200
    reward = load("countdown").compute_reward
    for row in [row for row in train if len(row["nums"]) == 3][:20]:
        assert row.keys() == {"nums", "target", "question"}
        assert str(row["target"]) in row["question"]
        assert any(reward(rf"\boxed{{{text}}}", row, 9) for text in solutions(row["nums"]))


def test_countdown_runs_without_a_column_answer(load, tmp_path):
    make_problems(tmp_path)
    flags = ["--max_prompt_tokens", 300, "--max_new_tokens", 4, "--eval_samples", 1, "--steps", 1]
    run(tmp_path, tmp_path / "run", *flags, script=load("countdown"))
    assert training_lines(tmp_path / "run")[0]["reward"] == 0


# --- a length bonus, top-p, a cosine schedule ---
def test_length_bonus_pays_short_right_responses_more(load):
    def reward(answer, length):
        return load("length_bonus").compute_reward(rf"\boxed{{{answer}}}", {"answer": "7"}, length)

    assert reward(7, 10) == 1.75  # 1 + (1 - 10 / 40)
    assert reward(7, 30) == 1.25
    assert reward(7, 40) == 1.0
    assert reward(7, 1000) == 1.0  # never less: eval_accuracy counts rewards of at least 1
    assert reward(8, 1) == 0.0  # a short wrong one earns nothing


PROBS = [0.5, 0.1, 0.3, 0.1]


@pytest.mark.parametrize("top_p, kept", [
    (0.4, [1.0, 0, 0, 0]), (0.5, [1.0, 0, 0, 0]), (0.7, [0.625, 0, 0.375, 0]),
    (1.0, PROBS), (0.0, [1.0, 0, 0, 0]),
])  # fmt: skip
def test_top_p_samples_from_the_likeliest_tokens(top_p, kept, load):
    """The smallest set of likeliest tokens with at least this probability, at least one of them."""
    uniforms = (torch.arange(1000) + 0.5) / 1000
    logits = torch.tensor(PROBS).log().repeat(1000, 1)
    tokens, logps = load("top_p").sample(logits, uniforms, 1.0, top_p)
    counts = tokens.bincount(minlength=4) / 1000
    torch.testing.assert_close(counts, torch.tensor(kept), rtol=0, atol=2e-3)
    # The log-prob is that of the distribution that was drawn from.
    torch.testing.assert_close(logps, torch.tensor(kept)[tokens].log())


def test_top_p_at_temperature_0_takes_the_likeliest(load):
    tokens, _ = load("top_p").sample(torch.tensor([PROBS]).log(), torch.tensor([0.99]), 0, 0.5)
    assert tokens.tolist() == [0]


def test_top_p_shows_in_sampling_logp_diff(load, data, tmp_path):
    """Training's log-probs are those of the whole softmax, not of what was drawn from."""
    logged = []
    for top_p in (1.0, 0.9):
        folder = tmp_path / str(top_p)
        run(data, folder, "--steps", 1, "--top_p", top_p, script=load("top_p"))
        logged.append(training_lines(folder)[0]["sampling_logp_diff"])
    assert logged[0] < 1e-5
    assert logged[1] > 1e-3


def test_cosine_falls_to_a_tenth_at_the_last_step(load):
    script = load("cosine")
    args = script.Args(learning_rate=2.0, warmup_steps=10, steps=110)
    rates = [script.learning_rate(step, args) for step in (1, 5, 10, 35, 60, 85, 110)]
    # Warm-up 1/10, 5/10, 10/10; then 0.55 + 0.45 cos of 0, 45, 90, 135 and 180 degrees.
    half = 0.45 * math.sqrt(0.5)
    assert rates == close([0.2, 1.0, 2.0, 2 * (0.55 + half), 1.1, 2 * (0.55 - half), 0.2])
    args = script.Args(learning_rate=2.0, warmup_steps=10, steps=10)  # nothing but warm-up
    assert script.learning_rate(10, args) == close(2.0)


def test_cosine_is_what_a_run_logs(load, data, tmp_path):
    args = parse("--steps", 2, script=load("cosine"))
    run(data, tmp_path, "--steps", 2, script=load("cosine"))
    rates = [line["learning_rate"] for line in training_lines(tmp_path)]
    assert rates == close([load("cosine").learning_rate(step, args) for step in (1, 2)])
    assert rates[1] < rates[0]


# --- GSPO's ratio, another KL estimator ---
OLD = [[LOGPS[0][0] - 2 * LN2, LOGPS[0][1]], [LOGPS[1][0] - math.log(1.1), 0.0]]  # ratios 4, 1, 1.1


def test_gspo_ratio_is_the_geometric_mean_of_a_response(load):
    loss, gradient, metrics = loss_and_gradient(load("gspo"), LOGPS, OLD, [-1, 1], MASK)
    # Ratios sqrt(4 * 1) = 2 and 1.1. A negative advantage is not clipped above.
    assert loss == close(0.45)  # - (-1 * 2 + 1 * 1.1) / 2
    # d ratio / d logp = ratio / L: the first 2 / 2 / 2 for either token, the second - 1.1 / 2
    assert gradient == close([0.5, 0.5, -0.55, 0.0])
    assert metrics["clip_frac"] == 0
    loss, gradient, _ = loss_and_gradient(grpo, LOGPS, OLD, [-1, 1], MASK)
    assert loss == close(0.25 * 4 + 0.25 * 1 - 0.5 * 1.1)
    assert gradient == close([1.0, 0.25, -0.55, 0.0])


def test_gspo_clips_whole_responses(load):
    loss, gradient, metrics = loss_and_gradient(load("gspo"), LOGPS, OLD, [1, -1], MASK)
    assert loss == close(-(1.2 - 1.1) / 2)  # 2 is clipped to 1.2
    assert gradient == close([0.0, 0.0, 0.55, 0.0])
    assert metrics["clip_frac"] == close(2 / 3)  # two of three tokens


def test_gspo_first_update_is_grpo(load):
    loss, gradient, _ = loss_and_gradient(load("gspo"), LOGPS, LOGPS, [1, -1], MASK)
    assert loss == close(0.0)
    assert gradient == close([-0.25, -0.25, 0.5, 0.0])


def test_k2_value_and_gradient(load):
    # ref - logp: ln 2, -2 ln 2 and 0
    ref = [[LOGPS[0][0] + LN2, LOGPS[0][1] - 2 * LN2], [LOGPS[1][0], 0.0]]
    loss, gradient, metrics = loss_and_gradient(
        load("k2"), LOGPS, LOGPS, [0, 0], MASK, ref, beta=0.1)
    # Squares / 2: 1/2, 2 and 0 (ln 2)^2, with weights 1/4, 1/4, 1/2; the metric is a plain mean.
    assert loss == close(0.1 * 0.625 * LN2**2)
    assert metrics["kl"] == close(2.5 / 3 * LN2**2)
    assert gradient == close([-0.025 * LN2, 0.05 * LN2, 0.0, 0.0])  # beta W (logp - ref)


def test_k2_mean_gradient_is_that_of_the_kl(load):
    """Three tokens, each a response of its own, weighted by its probability: an expectation."""
    q = torch.tensor([0.2, 0.3, 0.5])[:, None]

    def gradient(loss):
        logits = torch.tensor([0.7, -0.4, 0.1], requires_grad=True)
        loss(logits.log_softmax(0)[:, None]).backward()  # (3, 1)
        return logits.grad.tolist()

    def penalty(script):
        args = script.Args(beta=1.0)
        zeros = torch.zeros(3, 1)

        def loss(logp):
            weights = logp.detach().exp()
            return script.policy_loss(
                logp, logp.detach(), q.log(), zeros, weights, zeros == 0, args)[0]

        return loss

    def kl(logp):  # KL(policy || reference)
        return (logp.exp() * (logp - q.log())).sum()

    def other_kl(logp):  # KL(reference || policy)
        return (q * (q.log() - logp)).sum()

    assert gradient(penalty(load("k2"))) == close(gradient(kl))
    assert gradient(penalty(grpo)) == close(gradient(other_kl))
    assert gradient(kl) != pytest.approx(gradient(other_kl), rel=0.1)
