"""analysis.py on a model: estimators against brute force and known answers, commands end to end."""

import itertools
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import analysis
import common
import ep_grpo
import grpo
from common import BadInput, load_model
from conftest import ROOT, parse
from conftest import run as train


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def drawn():
    """The tiny model, its args, and 6 different responses to one problem, two of them right."""
    args = parse("--temperature", 2.0, "--steps", 0)
    model, tokenizer = load_model(args.model, "cpu")
    problems = grpo.load_problems(tokenizer, args)[1][:1]
    batch = next(analysis.draw_groups(model, tokenizer, problems, 6, args))
    assert len({tuple(ids) for ids in batch.input_ids.tolist()}) == 6
    batch.rewards = torch.tensor([[1.0, 0, 1, 0, 0, 0]])
    return model, args, batch


def run(*argv):
    options = analysis.parse_options([str(x) for x in argv])
    return options.function(options)


# --- estimators ---
def test_zero_variance_share_is_the_mean_over_all_groups_that_could_be_drawn():
    for n, size in (6, 2), (6, 3), (7, 4), (5, 5):
        for c in range(n + 1):
            groups = list(itertools.combinations([1] * c + [0] * (n - c), size))
            share = sum(len(set(some)) == 1 for some in groups) / len(groups)
            assert analysis.zero_variance_share(n, c, size) == pytest.approx(share)


def test_ranks_of_matrices_with_known_singular_values():
    left, right = (torch.linalg.qr(torch.randn(n, 4, dtype=torch.float64)).Q for n in (9, 30))
    cases = [
        ([5, 5, 5, 5], 4, 4),
        ([3, 0, 0, 0], 1, 1),
        ([2, 1, 1, 0], 1.5, 3),
        ([10, 1, 1, 1], 1.03, 1),
    ]
    for values, stable, needed in cases:
        sigma = torch.tensor(values, dtype=torch.float64)
        matrix = left @ torch.diag(sigma) @ right.T
        q = [x / sum(values) for x in values if x]
        expected = stable, math.exp(-sum(x * math.log(x) for x in q)), needed
        for turned in (matrix, matrix.T):
            # A Gram matrix squares: a 0 comes back as up to 1e-8 of the largest value.
            found = analysis.effective_ranks(turned @ turned.T)
            assert found == pytest.approx(expected, abs=1e-5)


def test_fit_exponent_recovers_a_known_one():
    random = np.random.default_rng(0)
    lengths = random.integers(4, 300, 400)
    k, error = analysis.fit_exponent(lengths, 3.0 * lengths**0.7, np.arange(400))
    assert (k, error) == (pytest.approx(0.7), pytest.approx(0, abs=1e-9))
    # The error is the scatter of the fits, also where ten responses share their noise.
    for clusters in np.arange(400), np.arange(400) // 10:
        lengths = np.exp(random.normal(4, 1, 400))[clusters]
        fits = []
        for _ in range(300):
            noise = random.normal(0, 0.5, 400)[clusters]
            fits.append(analysis.fit_exponent(lengths, lengths**0.3 * np.exp(noise), clusters))
        ks, errors = np.array(fits).T
        assert ks.mean() == pytest.approx(0.3, abs=0.02)
        assert np.mean(errors) == pytest.approx(ks.std(), rel=0.25)


# --- gradients ---
def test_response_gradients_add_up_to_the_gradient_of_the_training_loss(drawn):
    model, args, batch = drawn
    advantages = grpo.compute_advantages(batch, args)
    weights = grpo.compute_weights(batch, args)
    both = advantages * weights
    rows = [analysis.response_gradient(model, batch, i, both, args) for i in range(6)]
    batch.old_logps, _ = grpo.score(model, batch, args)
    loss = 0.0
    for rows_, columns, logps, _ in grpo.micro_batches(model, batch, args):
        part = (x[rows_, columns] for x in (advantages, weights, batch.mask))
        loss += grpo.policy_loss(logps, batch.old_logps[rows_, columns], None, *part, args)[0]
    for whole, *parts in zip(torch.autograd.grad(loss, analysis.trained_weights(model)), *rows):
        torch.testing.assert_close(-sum(parts), whole, rtol=1e-3, atol=1e-6)


def ranks_of(matrix):
    """The ranks from a singular value decomposition."""
    return analysis.effective_ranks(torch.linalg.svdvals(matrix).square().diag())


def test_group_ranks_are_those_of_the_matrices_written_out(drawn):
    model, args, batch = drawn
    found = analysis.group_ranks(model, batch, [2, 3], args)
    assert [x is None for x in found[2]] == [False, False, True]  # rewards 1 0 | 1 0 | 0 0
    assert [x is None for x in found[3]] == [False, True]  # 1 0 1 | 0 0 0
    for rows, ranks in (slice(0, 3), found[3][0]), (slice(2, 4), found[2][1]):
        part = grpo.Batch(
            rewards=batch.rewards[:, rows], mask=batch.mask[rows], input_ids=batch.input_ids[rows],
            attention_mask=batch.attention_mask[rows])  # fmt: skip
        both = grpo.compute_advantages(part, args) * grpo.compute_weights(part, args)
        gradients = [
            analysis.response_gradient(model, part, i, both, args)
            for i in range(len(part.mask))
        ]
        matrix = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients])
        summed = [sum(parts) for parts in zip(*gradients)]
        matrices = [g.double() for g in summed if g.dim() == 2]
        by_weight = [ranks_of(g) for g in matrices]
        expected = [*ranks_of(matrix.double())]
        assert ranks == pytest.approx(expected + list(np.mean(by_weight, 0)), rel=1e-3)


# --- EP-GRPO's view ---
def test_gate_bucket_and_log_ratio_put_together_are_ep_grpos_advantage(drawn):
    model, _, batch = drawn
    args = parse("--gate_sharpness", 1.7, "--buckets", 4, script=ep_grpo)
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch.ref_logps = batch.old_logps + 0.3 * noise
    for rewards in ([1.0, 0, 1, 0, 0, 0], [1.0] * 6, [0.0] * 6):
        batch.rewards = torch.tensor([rewards])
        seen = analysis.what_ep_grpo_sees(batch, args)
        z = torch.zeros(batch.mask.shape)
        for bucket in range(4):
            cell = batch.mask & (seen["bucket"] == bucket)
            delta = seen["log-ratio"][cell].double()
            if len(delta):
                z[cell] = ((delta - delta.mean()) / (delta.std(correction=0) + 1e-3)).float()
        outcome = grpo.compute_advantages(batch, args)
        anchor = outcome.sign() if outcome.any() else torch.tensor(rewards)[:, None] * 2 - 1
        expected = seen["gate"] * outcome + args.progress_weight * anchor * z
        expected = torch.where(batch.mask, expected, 0.0)
        torch.testing.assert_close(seen["advantage"], expected, rtol=1e-4, atol=1e-5)


# --- models and runs ---
def test_a_run_stands_for_its_latest_checkpoint_and_brings_its_flags(tmp_path):
    config = {"script": "grpo", "dataset": "somewhere", "max_new_tokens": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="no checkpoint"):
        analysis.find_model(str(tmp_path))
    for step in (5, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert analysis.find_model(str(tmp_path)) == (str(tmp_path / "checkpoint-20"), config)
    five = str(tmp_path / "checkpoint-5")
    assert analysis.find_model(five) == (five, config)
    tiny = grpo.TINY_DIR  # a model's folder has a config.json too
    assert analysis.find_model(None) == analysis.find_model(tiny) == (tiny, {})


def test_flags_come_from_the_command_line_then_the_run_then_the_defaults(tmp_path):
    (tmp_path / "checkpoint-5").symlink_to(grpo.TINY_DIR)
    lines = Path(grpo.TINY_DIR, "test.jsonl").read_text().splitlines()[10:20]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines))
    flags = {"script": "grpo", "eval_dataset": str(data), "max_new_tokens": 7, "temperature": 0.7}
    flags |= {"steps": 50, "resume": True, "instruction": "", "dataset": "nowhere"}
    (tmp_path / "config.json").write_text(json.dumps(flags))
    argv = ["rank", "--model", str(tmp_path), "--temperature", "0.9", "--problems", "3"]
    _, _, problems, args = analysis.set_up(analysis.parse_options(argv))
    assert (args.temperature, args.max_new_tokens, args.eval_dataset) == (0.9, 7, str(data))
    assert [x["question"] for x in problems] == [json.loads(x)["question"] for x in lines[:3]]


# --- every command ---
@pytest.mark.parametrize(
    "command, columns",
    [
        ("degeneracy --groups 2 4 --samples 8", "i.i.d. prediction"),
        ("rank --groups 2 4 --samples 4", "weights: stable"),
        ("share --samples 4 --problems 6", "k of the gradient"),
        ("tokens --samples 4", "quantity"),
        ("passk --samples 4 --model tiny tiny/.", "problems never solved"),
    ],
)
def test_command(command, columns, tmp_path, capsys):
    name, *flags = command.replace("tiny", grpo.TINY_DIR).split()
    flags += ["--output", str(tmp_path / "picture.png")]
    if "--problems" not in flags:
        flags += ["--problems", "3"]
    analysis.main([name, *flags])
    printed = capsys.readouterr().out
    assert columns in printed and "|---|" in printed and "\nFrom the papers. Claim" in printed
    assert "nan" not in printed.lower()
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_degeneracy_and_pass_at_k_by_hand(monkeypatch):
    counts = {None: [8, 4, 0, 2], "base": [0, 1, 4, 8], "trained": [2, 0, 8, 8]}
    monkeypatch.setattr(
        analysis, "count_right", lambda options, name=None, run=None: np.array(counts[name]))
    (table,), _ = run("degeneracy", "--samples", 8, "--groups", 2)
    shares = [1, 12 / 28, 1, 16 / 28]
    predicted = (14 / 32) ** 2 + (18 / 32) ** 2
    row = table[2][0]
    assert row[0] == 2 and row[1] == pytest.approx(np.mean(shares))
    assert row[3:5] == pytest.approx([predicted, np.mean(shares) - predicted])
    tables, _ = run("passk", "--samples", 8, "--model", "base", "trained")
    base, trained = tables[0][2]
    assert base[1] == pytest.approx(13 / 32) and base[-2:] == [0.75, 1]
    assert trained[1] == pytest.approx(18 / 32) and trained[-2:] == [0.75, 1]
    difference = tables[1][2][0]
    gains = np.array([2, -1, 4, 0]) / 8
    assert difference[1:3] == pytest.approx([gains.mean(), gains.std(ddof=1) / 2])
    assert difference[3] == 0 and difference[5:] == ["1 of 1", "1 of 3"]


def test_the_error_of_the_difference_from_iid_is_the_jackknifes(monkeypatch):
    counts = np.random.default_rng(0).binomial(16, 0.8, 60)
    monkeypatch.setattr(analysis, "count_right", lambda options: counts)
    (table,), _ = run("degeneracy", "--samples", 16, "--groups", 4)
    shares = np.array([analysis.zero_variance_share(16, int(c), 4) for c in counts])
    gaps = []
    for i in range(60):  # leave out one problem after the other
        p = np.delete(counts, i).mean() / 16
        gaps.append(np.delete(shares, i).mean() - p**4 - (1 - p) ** 4)
    assert table[2][0][5] == pytest.approx(np.std(gaps) * 59**0.5, rel=0.05)


def test_a_responses_share_grows_by_the_power_alpha_of_its_length():
    (table,), _ = run("share", "--samples", 4, "--problems", 6)
    alphas, weight, _, gradient, _, short, long = map(np.array, zip(*table[2]))
    assert np.allclose(weight - weight[0], alphas) and np.allclose(gradient - gradient[0], alphas)
    assert weight[0] - gradient[0] > 0.5  # short, surprising guesses have large gradients here
    assert short[0] > 1 > long[0] and long[-1] > long[0]


@pytest.mark.parametrize(
    "command, message",
    [
        ("degeneracy --samples 8", "at most --samples"),
        ("rank --groups 1 2", "at least 2"),
        ("degeneracy --groups 1", "--groups must be at least 2"),
        ("share --samples 1", "at least 2"),
        ("tokens --problems 0", "--problems at least 1"),
        ("passk --model {tiny}", "two models"),
        ("share --model nowhere/at/all", "cannot load the model nowhere/at/all"),
        ("rank --samples 2 --groups 2 --problems 1 --max_new_tokens 1", "no gradient"),
        ("degeneracy --problems 1 --max_prompt_tokens 1", "no held-out problem"),
        ("share --temperature 0", "--temperature must be at least 0.01"),
        ("share --eval_dataset nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_bad_input_is_named(command, message):
    with pytest.raises(BadInput, match=message):
        run(*command.format(tiny=grpo.TINY_DIR).split())


@pytest.fixture(scope="module")
def own_run(data, tmp_path_factory):
    """A run of one step of a script of one's own."""
    folder = tmp_path_factory.mktemp("own")
    train(data, folder / "mine", "--steps", 1, "--eval_problems", 1)
    config = json.loads((folder / "mine/config.json").read_text())
    (folder / "mine/config.json").write_text(json.dumps(config | {"script": "mine"}))
    return folder / "mine"


def test_whose_rewards_are_measured_is_said(own_run, capsys):
    """Fault: a run of one's own script is graded by grpo.py's reward, without a word."""
    run("degeneracy", "--model", own_run, "--problems", 1, "--samples", 2, "--groups", 2)
    assert "those of grpo.py, not of mine.py" in capsys.readouterr().err
    with pytest.raises(BadInput, match="two models"):
        run("passk", "--model", own_run)


def test_tokens_of_a_run_from_any_folder(own_run, tmp_path, monkeypatch):
    """Fault: the model that the run started from is found in the repository's root only."""
    monkeypatch.chdir(tmp_path)
    run("tokens", "--model", own_run, "--problems", 1, "--samples", 2)


def test_ctrl_c_is_no_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["analysis.py", "share"])

    def load_model(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "load_model", load_model)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "analysis.py"), run_name="__main__")
    assert end.value.code == 130


def test_a_console_that_cannot_show_a_character(tmp_path):
    command = [sys.executable, ROOT / "analysis.py", "map", ROOT / "docs/runs/map.jsonl"]
    command += ["--only", "*_0.03_G2_s0", "--output", tmp_path / "map"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert b"| ? |" in result.stdout
