"""analysis.py: its estimators against brute force and known answers, and every subcommand from end to end."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import analysis
import ep_grpo
import grpo
from common import BadInput, load_model


@pytest.fixture(scope="module")
def drawn():
    """The tiny model, its args, and 6 different responses to one problem, rewards overwritten: two are right."""
    args = grpo.parse_args(["--temperature", "2.0"])
    model, tokenizer = load_model(args.model, "cpu")
    problems = grpo.load_problems(args.dataset, None, "test", tokenizer, args)[:1]
    batch = next(analysis.draw(model, tokenizer, problems, 6, args))
    assert len({tuple(ids) for ids in batch.input_ids.tolist()}) == 6
    batch.rewards = torch.tensor([[1.0, 0, 1, 0, 0, 0]])
    return model, args, batch


def metrics(step, reward, loss):
    """A training step's line of metrics.jsonl."""
    line = {"step": step, "reward": reward, "degenerate_frac": 0.3, "degenerate_iid": 0.2, "completion_len": 12.0}
    return line | {"entropy": 0.5, "loss": loss, "grad_norm": 0.1}


def make_run(folder, script, seed, accuracy=0.5, **flags):
    """A run's folder with three steps and an evaluation before and after them."""
    folder.mkdir(parents=True)
    config = {"script": script, "seed": seed, "output_dir": str(folder), "group_size": 8} | flags
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": 0, "eval_accuracy": 0.4}]
    lines += [metrics(step, 0.4 + step / 10, step / 10 + seed / 100) for step in (1, 2, 3)]
    lines += [{"step": 3, "eval_accuracy": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def run(*argv):
    """A subcommand as the command line starts it."""
    options = analysis.parse_options([str(x) for x in argv])
    options.function(options)


# --- estimators ---
def test_degenerate_share_is_the_mean_over_all_groups_that_could_be_drawn():
    for n, group in (6, 2), (6, 3), (7, 4), (5, 5):
        for c in range(n + 1):
            groups = list(itertools.combinations([1] * c + [0] * (n - c), group))
            share = sum(len(set(some)) == 1 for some in groups) / len(groups)
            assert analysis.degenerate_share(n, c, group) == pytest.approx(share)


def test_ranks_of_matrices_with_known_singular_values():
    left, right = (torch.linalg.qr(torch.randn(n, 4, dtype=torch.float64)).Q for n in (9, 30))
    cases = ([5, 5, 5, 5], 4, 4), ([3, 0, 0, 0], 1, 1), ([2, 1, 1, 0], 1.5, 3), ([10, 1, 1, 1], 1.03, 1)
    for values, stable, needed in cases:
        sigma = torch.tensor(values, dtype=torch.float64)
        matrix = left @ torch.diag(sigma) @ right.T
        q = [x / sum(values) for x in values if x]
        expected = stable, math.exp(-sum(x * math.log(x) for x in q)), needed
        for turned in (matrix, matrix.T):
            # A Gram matrix squares: a 0 comes back as up to 1e-8 of the largest, and the entropy sees x log x of it.
            assert analysis.ranks(analysis.singular_values(turned)) == pytest.approx(expected, abs=1e-5)


def test_fit_exponent_recovers_a_known_one():
    random = np.random.default_rng(0)
    lengths = random.integers(4, 300, 400)
    k, se = analysis.fit_exponent(lengths, 3.0 * lengths**0.7, np.arange(400))
    assert (k, se) == (pytest.approx(0.7), pytest.approx(0, abs=1e-9))
    # The error is the scatter of the fits: independent noise, and noise that the ten responses of a cluster share.
    for clusters in np.arange(400), np.arange(400) // 10:
        lengths = np.exp(random.normal(4, 1, 400))[clusters]
        fits = []
        for _ in range(300):
            noise = random.normal(0, 0.5, 400)[clusters]
            fits.append(analysis.fit_exponent(lengths, lengths**0.3 * np.exp(noise), clusters))
        ks, errors = np.array(fits).T
        assert ks.mean() == pytest.approx(0.3, abs=0.02)
        assert np.mean(errors) == pytest.approx(ks.std(), rel=0.25)


def test_permutation_p_by_hand():
    assert analysis.permutation_p([1, 2, 3], [10, 11, 12]) == pytest.approx(2 / 20)  # parted: this deal and its mirror
    assert analysis.permutation_p([1.0], [1.0]) == 1
    assert analysis.permutation_p([0, 0, 0, 0, 1], [2, 3, 4, 5, 6]) == pytest.approx(2 / 252)


def test_clear_takes_two_standard_errors():
    assert [analysis.clear(x, 1.0) for x in (-2.1, -1.9, 0, 1.9, 2.1)] == [-1, 0, 0, 0, 1]
    assert analysis.clear(5.0, math.nan) == 0


# --- gradients ---
def test_response_gradients_add_up_to_the_gradient_of_the_training_loss(drawn):
    model, args, batch = drawn
    advantages, weights = grpo.compute_advantages(batch, args), grpo.compute_weights(batch, args)
    parameters = list(model.parameters())
    rows = [analysis.response_gradient(model, batch, i, advantages * weights, parameters, args) for i in range(6)]
    batch.old_logps, _ = grpo.score(model, batch, args)
    loss = 0.0
    for part, logps, _ in grpo.micro_batches(model, batch, args):
        cut = part, slice(logps.shape[1])
        loss = loss + grpo.policy_loss(logps, batch.old_logps[cut], None, advantages[cut], weights[cut], args)[0]
    for whole, *parts in zip(torch.autograd.grad(loss, parameters), *rows):
        torch.testing.assert_close(-sum(parts), whole, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("limit", (1e9, 1e5))  # all weights at once, or in many chunks
def test_group_ranks_are_those_of_the_matrices_written_out(drawn, limit):
    model, args, batch = drawn
    found = analysis.group_ranks(model, batch, [2, 3], args, limit)
    assert [x is None for x in found[2]].count(True) == 1  # rewards 1 0 | 1 0 | 0 0
    assert len(found[2]) == 3 and len(found[3]) == 2  # 1 0 1 | 0 0 0
    rows = slice(0, 3)
    part = grpo.Batch(batch.rewards[:, rows], batch.mask[rows], batch.input_ids[rows], batch.attention_mask[rows])
    both = grpo.compute_advantages(part, args) * grpo.compute_weights(part, args)
    parameters = list(model.parameters())
    gradients = [analysis.response_gradient(model, part, i, both, parameters, args) for i in range(3)]
    matrix = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients])  # (R, parameters)
    summed = [sum(parts) for parts in zip(*gradients)]
    by_weight = [analysis.ranks(torch.linalg.svdvals(g.double())) for g in summed if g.dim() == 2]
    expected = [*analysis.ranks(torch.linalg.svdvals(matrix.double())), *np.mean(by_weight, 0)]
    kept = [x for x in found[3] if x]
    assert len(kept) == 1 and kept[0] == pytest.approx(expected, rel=1e-3)


# --- EP-GRPO's view ---
def test_gate_bucket_and_log_ratio_put_together_are_ep_grpos_advantage(drawn):
    model, _, batch = drawn
    args = ep_grpo.parse_args(["--gate_sharpness", "1.7", "--buckets", "4"])
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    batch.ref_logps = batch.old_logps + 0.3 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
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
        expected = torch.where(batch.mask, seen["gate"] * outcome + args.progress_weight * anchor * z, 0.0)
        torch.testing.assert_close(seen["advantage"], expected, rtol=1e-4, atol=1e-5)


def test_token_page_escapes_model_text_and_keeps_it_whole():
    texts = ["<script>alert(1)</script>", "\n", "&amp;", '"quoted" \'text\'', "$x$"]
    columns = {"entropy": np.arange(5.0), "advantage": np.linspace(-1, 1, 5)}
    shades = {name: analysis.token_colours(values) for name, values in columns.items()}
    page = analysis.token_page("1 < 2 & <b>", texts, columns, shades)
    assert "<script" not in page and "<b>" not in page and "1 &lt; 2 &amp; &lt;b&gt;" in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == len(columns)
    assert "&amp;amp;" in page and '"quoted"' not in page and "http" not in page  # self-contained
    assert page.count("<span") == len(texts) * len(columns)


# --- runs ---
def test_runs_are_grouped_by_all_that_differs_but_the_seed(tmp_path):
    ablation = {"entropy_gate": False, "progress_weight": 0.1}
    folders = [
        make_run(tmp_path / "a", "grpo", 0), make_run(tmp_path / "b", "grpo", 1),
        make_run(tmp_path / "c", "grpo", 0, group_size=4),
        make_run(tmp_path / "d", "length_alpha", 0, alpha=0.5), make_run(tmp_path / "e", "length_alpha", 0, alpha=1.0),
        make_run(tmp_path / "f", "ep_grpo", 0, entropy_gate=True, progress_weight=0.1),
        make_run(tmp_path / "g", "ep_grpo", 0, **ablation), make_run(tmp_path / "h", "ep_grpo", 1, **ablation),
    ]  # fmt: skip
    groups = analysis.group_runs([analysis.read_run(folder) for folder in folders])
    assert {label: len(runs) for label, runs in groups.items()} == {
        "grpo G=8": 2, "grpo G=4": 1, "length_alpha α=0.5 G=8": 1, "length_alpha α=1.0 G=8": 1, "ep_grpo G=8": 1,
        "ep_grpo no entropy_gate G=8": 2}  # fmt: skip
    colours = analysis.colours(list(groups))
    assert len(set(colours.values())) == len(groups)


def test_the_same_run_twice_is_refused_not_counted_as_two_seeds(tmp_path):
    a, b = make_run(tmp_path / "a", "grpo", 0), make_run(tmp_path / "b", "grpo", 1)
    with pytest.raises(BadInput, match="same seed"):
        run("curves", a, a)
    c = make_run(tmp_path / "c", "grpo", 0)
    changed = (tmp_path / "c/metrics.jsonl").read_text().replace('"loss": 0.', '"loss": 5.')  # on another machine
    (tmp_path / "c/metrics.jsonl").write_text(changed)
    with pytest.raises(BadInput, match="same seed or numbers"):
        run("curves", a, c)
    (tmp_path / "b/metrics.jsonl").write_text((tmp_path / "a/metrics.jsonl").read_text())  # the seed changed nothing
    with pytest.raises(BadInput, match="same seed or numbers"):
        run("curves", a, b)


def test_curves_verdict_follows_the_numbers(tmp_path, capsys):
    for better in ("sign_grpo", "grpo"):
        folders = []
        for script in ("sign_grpo", "grpo"):
            for seed in range(4):
                accuracy = (0.9 if script == better else 0.6) + seed / 100
                folders.append(make_run(tmp_path / better / f"{script}{seed}", script, seed, accuracy))
        run("curves", *folders, "--out", tmp_path / "curves.png")
        out = capsys.readouterr().out
        sign = "+" if better == "sign_grpo" else "-"
        assert f"sign_grpo minus grpo at step 3: {sign}30.0 points, clear (p = 0.029" in out
        assert "| grpo | 4 | 3 | 0.400 ± 0.000 |" in out
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_run_stands_for_its_newest_checkpoint_and_brings_its_flags(tmp_path):
    make_run(tmp_path / "a", "grpo", 0, dataset="somewhere", max_new_tokens=7)
    with pytest.raises(BadInput, match="no checkpoint"):
        analysis.find_model(str(tmp_path / "a"))
    for step in (5, 20):
        (tmp_path / f"a/checkpoint-{step}").mkdir()
    for name, step in (tmp_path / "a", 20), (tmp_path / "a/checkpoint-5", 5):
        path, flags = analysis.find_model(str(name))
        assert path.endswith(f"checkpoint-{step}") and flags["dataset"] == "somewhere"
    assert analysis.find_model(grpo.TINY_DIR) == (grpo.TINY_DIR, {})  # a model's folder has a config.json too


def test_only_what_is_equal_is_averaged_whatever_the_ends_of_names(tmp_path):
    folders = [make_run(tmp_path / name, "grpo", seed, model=f"runs/{name}/checkpoint-500", beta=0.1 * seed)
               for seed, name in enumerate(("3b", "7b"))]  # fmt: skip
    folders.append(make_run(tmp_path / "none", "grpo", 2, model=None, beta=0.0))
    groups = analysis.group_runs([analysis.read_run(folder) for folder in folders])
    assert [len(runs) for runs in groups.values()] == [1, 1, 1]
    names = [label.split("model=")[1] for label in groups]
    assert names == ["runs/3b/checkpoint-500", "runs/7b/checkpoint-500", "None"]


def test_scripts_of_ones_own_are_told_apart():
    colours = analysis.colours(["my_rgra", "grpo", "my_raft", "grpo G=4"])
    assert len(set(colours.values())) == 4 and colours["grpo"] == analysis.colours(["grpo"])["grpo"]


def test_curves_compares_where_all_common_flags_are_equal(tmp_path, capsys):
    """An ablation is compared with grpo, too; runs that were only evaluated before training are compared nowhere."""
    folders = []
    for name, script, flags in ("a", "grpo", {}), ("b", "ep_grpo", {"λ": 0.1}), ("c", "ep_grpo", {"λ": 0.0}):
        folders += [make_run(tmp_path / f"{name}{seed}", script, seed, 0.5, **flags) for seed in (0, 1)]
    folders += [make_run(tmp_path / f"d{seed}", "ep_grpo", seed, 0.5, group_size=4) for seed in (0, 1)]
    (tmp_path / "picture.png").touch()  # runs/* holds those of an earlier call
    run("curves", *folders, tmp_path / "picture.png", "--out", tmp_path / "one")
    found = capsys.readouterr().out.split("Found: ")[1]
    assert found.count(" minus grpo G=8 at step 3: +0.0") == 2 and "G=4 minus" not in found
    assert (tmp_path / "one.png").exists() and "one.png" in found
    lines = (tmp_path / "a0" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "a0" / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    run("curves", *folders, "--out", tmp_path / "one")
    out = capsys.readouterr().out
    assert " minus " not in out and out.count("accuracy ± sd") == 1


def test_the_problems_are_the_held_out_ones_with_their_own_configuration(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(analysis.grpo, "load_problems", lambda *given: asked.append(given[:3]) or ["problem"])
    monkeypatch.setattr(analysis, "load_model", lambda *given: (None, None))
    for flags, given, expected in (
        ({"dataset": "a/b", "dataset_config": "c"}, [], ("a/b", "c", "test")),
        ({"dataset": "a/b", "dataset_config": "c", "eval_dataset": "d/e"}, [], ("d/e", None, "test")),
        ({"dataset": "a/b"}, ["--dataset", "f/g", "--dataset_config", "h"], ("f/g", "h", "test")),
        ({"dataset": "a.jsonl"}, ["--dataset", "f.jsonl"], ("f.jsonl", "main", "test")),
        ({"dataset": "a.jsonl"}, [], None),
    ):
        options = analysis.parse_options(["degeneracy", "--device", "cpu", *given])
        if expected:
            analysis.set_up(options, run=flags)
            assert asked[-1] == expected
        else:
            with pytest.raises(BadInput, match="a.jsonl is what it was trained on"):
                analysis.set_up(options, run=flags)


# --- every subcommand ---
@pytest.mark.parametrize(
    "command, expected",
    [
        ("degeneracy --groups 2 4 --samples 8", "G = 4: "),
        ("rank --groups 2 4 --samples 4 --memory_gb 0.01", "responses, stable: "),
        ("length --samples 4 --problems 6 --alphas 0 1", "the gradient would not depend on length at alpha = "),
        ("tokens --samples 4", "the most uncertain fifth"),
        ("passk --samples 4 --model tiny tiny/.", "+0.0 ± 0.0 at k = 4: no clear change"),
    ],
)
def test_subcommand(command, expected, tmp_path, capsys, data):
    out = tmp_path / "new" / "picture.png"
    name, *flags = command.replace("tiny", grpo.TINY_DIR).split()
    if name == "degeneracy":
        flags += ["--runs", make_run(tmp_path / "a", "grpo", 0), make_run(tmp_path / "b", "grpo", 1)]
    run(name, *flags, *(() if "--problems" in flags else ("--problems", 3)), "--dataset", data, "--out", out)
    printed = capsys.readouterr().out
    assert "|---|" in printed and "\nClaim: " in printed and "nan" not in printed.lower().split("claim:")[0]
    found = next(line for line in printed.splitlines() if line.startswith("Found: "))
    assert expected in found
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    if name == "tokens":
        assert "<h2>log-ratio" in out.with_suffix(".html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command, message",
    [
        ("curves nowhere", "holds no readable run"),
        ("degeneracy --samples 8", "largest of --groups, 16"),
        ("rank --groups 1 2", "at least 2"),
        ("length --samples 1", "at least 2"),
        ("tokens --samples 1", "at least 2"),
        ("passk --model {tiny}", "two models"),
        ("length --model nowhere", "cannot load the model nowhere"),
        ("tokens --row 9 --samples 2 --problems 1", "rows 0 to 1"),
        ("rank --samples 2 --groups 2 --problems 1 --max_new_tokens 1", "no gradient"),
        ("degeneracy --problems 1 --max_prompt_tokens 1", "no usable problems"),
    ],
)
def test_bad_input_is_named(command, message):
    with pytest.raises(BadInput, match=message):
        run(*command.format(tiny=grpo.TINY_DIR).split())


def test_a_picture_that_cannot_be_written_is_bad_input(tmp_path):
    for out in (tmp_path / "picture.unknown", "/proc/nowhere/picture.png"):
        with pytest.raises(BadInput, match="cannot write the picture"):
            run("curves", make_run(tmp_path / f"run{out}".replace("/", "_"), "grpo", 0), "--out", out)
