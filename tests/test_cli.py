"""The command line: defaults, bad input, what a run leaves behind, what it says aloud (FAULTS 17, 41, 44)."""

import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import dr_grpo
import ep_grpo
import grpo
import length_alpha
import sign_grpo
from common import BadInput

ROOT = Path(grpo.__file__).parent
SCRIPTS = {"grpo": grpo, "dr_grpo": dr_grpo, "sign_grpo": sign_grpo, "length_alpha": length_alpha, "ep_grpo": ep_grpo}
FLAGS = """model dataset dataset_config eval_dataset instruction output_dir resume seed device
    prompts_per_step group_size max_prompt_tokens max_new_tokens temperature
    steps learning_rate warmup_steps weight_decay max_grad_norm updates_per_rollout clip_low clip_high beta
    micro_batch_tokens gradient_checkpointing
    eval_every eval_problems eval_samples log_completions_every save_every""".split()
OWN = {
    "grpo": [], "dr_grpo": [], "sign_grpo": [], "length_alpha": ["alpha", "scale_rewards"],
    "ep_grpo": "gate_sharpness buckets progress_weight reward_threshold entropy_gate zero_variance_anchor".split(),
}  # fmt: skip
METRICS = """step reward degenerate_frac degenerate_iid completion_len truncated_frac entropy loss grad_norm clip_frac
    kl learning_rate tokens seconds_rollout seconds_update""".split()
SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_problems 8".split()


def run(data, folder, *flags, script=grpo):
    script.main(script.parse_args([*SMALL, "--dataset", data, "--output_dir", str(folder), *map(str, flags)]))


def lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def weights(folder, step):
    return (folder / f"checkpoint-{step}/model.safetensors").read_bytes()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a script as the command line does, without the seconds that a new process takes to import torch."""

    def call(name, *flags):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
        return end.value.code, capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The folder of a finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    run(data, folder, "--steps", 2, "--eval_every", 1, "--eval_samples", 4)
    return folder


# --- flags ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_are_the_same_in_all_scripts(name):
    """Fault: a flag is missing in one of the five, has another name, or stands out of order."""
    assert [field.name for field in dataclasses.fields(SCRIPTS[name].Args)] == FLAGS + OWN[name]
    shared, defaults = vars(SCRIPTS[name].Args()), vars(grpo.Args())
    assert all(shared[flag] == value for flag, value in defaults.items())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_something_about_every_flag(name, capsys):
    """Fault: a flag without a line of help."""
    with pytest.raises(SystemExit) as end:
        SCRIPTS[name].parse_args(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(SCRIPTS[name].Args):
        text = field.metadata["help"]
        assert f"--{field.name}" in shown and "\n" not in text and 5 < len(text) < 110
        assert "".join(text.split()) in "".join(shown.split())


def test_without_a_model_the_tiny_recipe_is_taken():
    """Fault: the offline default needs the network, a GPU or hours."""
    args = grpo.parse_args([])
    assert vars(args) == vars(grpo.Args()) | grpo.TINY
    assert Path(args.model).is_dir() and Path(args.model) == Path(args.dataset) == ROOT / "tests/tiny"
    assert (args.device, args.max_new_tokens, args.learning_rate) == ("cpu", 48, 3e-4)


def test_given_flags_win_over_the_tiny_recipe():
    """Fault: the recipe overwrites what the user gave, also where it is the real model's default."""
    args = grpo.parse_args(["--learning_rate", "1e-6", "--steps", "500", "--gradient_checkpointing"])
    assert (args.learning_rate, args.steps, args.gradient_checkpointing) == (1e-6, 500, True)
    assert args.max_new_tokens == 48


def test_with_a_model_the_defaults_are_for_gsm8k_on_a_gpu():
    """Fault: the tiny recipe leaks into a real run."""
    args = grpo.parse_args(["--model", "Qwen/Qwen2.5-3B"])
    assert vars(args) == vars(grpo.Args()) | {"model": "Qwen/Qwen2.5-3B"}
    assert (args.dataset, args.dataset_config, args.learning_rate) == ("openai/gsm8k", "main", 1e-6)
    assert (args.group_size, args.max_new_tokens, args.temperature) == (8, 1024, 1.0)


def test_importing_does_nothing(tmp_path):
    """Fault: an import starts something, prints something or writes something."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


# --- bad input ---

BAD = {
    "unknown flag": (["--learning_rat", "1"], "--learning_rat"),
    "not a number": (["--steps", "many"], "--steps"),
    "group of one": (["--group_size", "1"], "--group_size must be at least 2"),
    "temperature 0": (["--temperature", "0"], "--temperature must be at least"),
    "temperature nan": (["--temperature", "nan"], "--temperature must be at least"),
    "steps -1": (["--steps", "-1"], "--steps must be at least 0"),
    "no prompts": (["--prompts_per_step", "0"], "--prompts_per_step must be at least 1"),
    "learning rate -1": (["--learning_rate", "-1"], "--learning_rate must be at least 0"),
    "save_every 0": (["--save_every", "0"], "--save_every must be at least 1"),
    "unknown model": (["--model", "no/such-model"], "no/such-model"),
    "missing file": (["--dataset", "no/such/file.jsonl"], "no/such/file.jsonl"),
    "missing evaluation": (["--eval_dataset", "missing.jsonl"], "missing.jsonl"),
    "nothing to resume": (["--resume"], "--resume"),
    "no cuda": (["--device", "cuda"], "--device cuda"),
    "other device": (["--device", "meta"], "--device meta"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(command, data, tmp_path, monkeypatch, bad):
    """Fault: a slip on the command line ends in a traceback, or starts a run that is not meant."""
    if bad == "no cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    flags, named = BAD[bad]
    code, errors = command("grpo", *SMALL, "--dataset", data, "--output_dir", "out", *flags)
    said = [line for line in errors.splitlines() if "error: " in line]
    assert code == 2 and len(said) == 1 and named in said[0] and "Traceback" not in errors
    assert len(errors.splitlines()) <= 2 + errors.count("[transformers]") + errors.count("it/s]")  # usage stands before
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.parametrize("alpha", ["-0.1", "1.1", "200"])
def test_an_alpha_outside_the_spectrum_is_one_sentence(command, data, tmp_path, alpha):
    """Fault: C to the power of 200 is an OverflowError in the first step."""
    code, errors = command("length_alpha", "--dataset", data, "--output_dir", tmp_path / "out", "--alpha", alpha)
    assert code == 2 and "--alpha must be at" in errors and "Traceback" not in errors


def test_a_folder_with_another_run_is_refused_and_untouched(command, finished, data):
    """Fault: a second run overwrites the first one's log and checkpoints."""
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for name in "grpo", "dr_grpo":
        code, errors = command(name, *SMALL, "--dataset", data, "--output_dir", finished)
        assert code == 2 and errors.startswith(f"error: {finished} holds a run") and len(errors.splitlines()) == 1
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_an_output_folder_that_cannot_be_is_one_sentence(command, data, tmp_path):
    """Fault: a traceback where the output folder is a file."""
    (tmp_path / "file").write_text("")
    code, errors = command("grpo", *SMALL, "--dataset", data, "--output_dir", tmp_path / "file")
    assert code == 2 and errors.startswith("error: cannot write to --output_dir")


def test_a_group_of_one_is_allowed_for_sign_grpo(data, tmp_path):
    """Fault: a group is asked for where no group mean is taken."""
    run(data, tmp_path, "--steps", 1, "--group_size", 1, script=sign_grpo)
    assert lines(tmp_path / "metrics.jsonl")[1]["grad_norm"] > 0


def test_a_true_process_from_another_folder(tmp_path):
    """Fault: the script works in its own folder only, or a bad flag does not reach the shell as exit code 2."""
    command = [sys.executable, str(ROOT / "length_alpha.py"), "--steps", "0", "--eval_problems", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(lines(tmp_path / "runs/length_alpha/metrics.jsonl")) == 1
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: runs/length_alpha holds a run")


# --- what a run leaves ---


def test_metrics_have_the_keys_of_the_design(finished):
    """Fault: a metric is missing, has another name, or is not JSON."""
    rows = lines(finished / "metrics.jsonl")
    steps, evaluations = [row for row in rows if "loss" in row], [row for row in rows if "loss" not in row]
    assert [list(row) for row in steps] == [METRICS] * 2
    assert [list(row) for row in evaluations] == [["step", "eval_accuracy", *(f"eval_pass@{k}" for k in (1, 2, 4))]] * 3
    assert [row["step"] for row in rows] == [0, 1, 1, 2, 2]
    for row in steps:
        p = row["reward"]
        assert row["degenerate_iid"] == pytest.approx(p**4 + (1 - p) ** 4)
        assert row["degenerate_frac"] in (0, 0.25, 0.5, 0.75, 1) and row["kl"] is None
        assert row["tokens"] == row["completion_len"] * 16
    for row in evaluations:
        assert row["eval_accuracy"] == pytest.approx(row["eval_pass@1"])
        assert row["eval_pass@1"] <= row["eval_pass@2"] <= row["eval_pass@4"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_logs_the_same_and_is_copied(name, data, tmp_path):
    """Fault: one of the five does not run, or its run does not say what made it."""
    run(data, tmp_path, "--steps", 1, script=SCRIPTS[name])
    assert list(lines(tmp_path / "metrics.jsonl")[1]) == METRICS
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("script") == name and list(config) == FLAGS + OWN[name]
    assert (config["group_size"], config["learning_rate"], config["dataset"]) == (4, 3e-4, data)
    assert (tmp_path / f"{name}.py").read_bytes() == (ROOT / f"{name}.py").read_bytes()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_evaluation_file_shows_what_was_graded_how(finished, data):
    """Fault: nobody can see which answers counted as right."""
    rows, problems = lines(finished / "eval-2.jsonl"), lines(Path(data) / "test.jsonl")
    assert [row["question"] for row in rows] == [problem["question"] for problem in problems]
    right = 0
    for row, problem in zip(rows, problems):
        assert list(row) == ["question", "answer", "samples", "verdicts"] and row["answer"] == problem["answer"]
        assert row["verdicts"] == [float(s.endswith(f"\\boxed{{{row['answer']}}}")) for s in row["samples"]]
        right += sum(row["verdicts"])
    assert lines(finished / "metrics.jsonl")[-1]["eval_accuracy"] == pytest.approx(right / 32) and 0 < right < 32


def test_steps_0_evaluates_only(finished, data, tmp_path):
    """Fault: an evaluation trains, needs training data, or gives another number than the training did."""
    shutil.copy(Path(data) / "test.jsonl", tmp_path)
    flags = ["--steps", 0, "--eval_dataset", tmp_path / "test.jsonl", "--model", finished / "checkpoint-2"]
    small = [*SMALL, "--device", "cpu", "--instruction", ""]
    grpo.main(grpo.parse_args([*small, *map(str, flags), "--output_dir", str(tmp_path / "out")]))
    (row,) = lines(tmp_path / "out/metrics.jsonl")
    assert row | {"step": 2} == lines(finished / "metrics.jsonl")[-1] and row["step"] == 0
    assert (tmp_path / "out/eval-0.jsonl").read_bytes() == (finished / "eval-2.jsonl").read_bytes()
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_resume_with_steps_0_evaluates_the_newest_checkpoint(finished, data, tmp_path):
    """Fault: --resume --steps 0 evaluates the base model, or trains."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    run(data, folder, "--steps", 0, "--resume")
    before = lines(finished / "metrics.jsonl")
    assert lines(folder / "metrics.jsonl") == [*before, before[-1]]
    assert weights(folder, 2) == weights(finished, 2)


def test_default_recipe_learns_and_saves_a_model(tmp_path, capsys):
    """Fault: everything runs and nothing is learnt."""
    flags = ["--steps", "15", "--eval_every", "100", "--eval_problems", "128", "--output_dir", str(tmp_path)]
    grpo.main(grpo.parse_args(flags))
    rows = lines(tmp_path / "metrics.jsonl")
    assert rows[0]["eval_accuracy"] <= 0.55 and rows[-1]["eval_accuracy"] >= 0.8
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-15")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint-15")
    ids = tokenizer("3+8+4=", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=48)[0])
    assert text.startswith("3+8+4=3+8=11;11+4=15;\\boxed{15}")
    out = capsys.readouterr().out
    assert "step 1, reward" in out and "step 0: eval_accuracy" in out  # completions, evaluations
    assert f"{tmp_path}: metrics.jsonl" in out.splitlines()[-2] + out.splitlines()[-1]


# --- nothing silent ---


def test_44_every_response_cut_off_is_said(data, tmp_path):
    """Fault: no response ever ends, every reward is 0, and nobody is told why."""
    with pytest.warns(UserWarning, match="every response was cut off.*--max_new_tokens"):
        run(data, tmp_path, "--steps", 1, "--max_new_tokens", 2)
    assert lines(tmp_path / "metrics.jsonl")[1]["truncated_frac"] == 1


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_44_twenty_steps_without_variance_are_said(data, tmp_path, monkeypatch, reward):
    """Fault: a run goes on for hours without any signal, and nobody is told."""
    monkeypatch.setattr(grpo, "verify", lambda text, answer: reward)
    small = "--prompts_per_step 1 --group_size 2 --max_new_tokens 12 --eval_problems 1 --eval_samples 1".split()
    with warnings.catch_warnings(record=True) as early:
        warnings.simplefilter("always")
        run(data, tmp_path / "19", *small, "--steps", 19)
    assert not [w for w in early if "20 steps" in str(w.message)]
    with pytest.warns(UserWarning, match="20 steps of groups all right or all wrong.*--group_size"):
        run(data, tmp_path / "20", *small, "--steps", 20)


def test_17_a_step_without_signal_moves_nothing(data, tmp_path, monkeypatch):
    """Fault: Adam's momentum moves the weights on a step whose advantages are all zero."""
    calls = []

    def compute_advantages(batch, args, real=grpo.compute_advantages):
        calls.append(batch)
        return real(batch, args) * (len(calls) == 1)

    monkeypatch.setattr(grpo, "compute_advantages", compute_advantages)
    run(data, tmp_path, "--steps", 3, "--weight_decay", 0.1, "--save_every", 1, "--updates_per_rollout", 2)
    assert weights(tmp_path, 2) == weights(tmp_path, 3) != (ROOT / "tests/tiny/model.safetensors").read_bytes()
    states = [torch.load(tmp_path / f"checkpoint-{step}/optimizer.pt", weights_only=True) for step in (2, 3)]
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert a["step"].item() == b["step"].item() == 2  # the updates of the first rollout
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and a["exp_avg"].any()


def poison(monkeypatch, steps):
    """Make the losses of these steps NaN."""
    seen = []

    def rollout(model, tokenizer, prompts, samples, args, generator, real=grpo.rollout):
        if samples == args.group_size:
            seen.append(len(seen) + 1)
        return real(model, tokenizer, prompts, samples, args, generator)

    def policy_loss(*given, real=grpo.policy_loss):
        loss, metrics = real(*given)
        return loss * (float("nan") if seen[-1] in steps else 1), metrics

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "policy_loss", policy_loss)


def test_44_a_gradient_that_is_not_finite_is_refused_and_said(data, tmp_path, monkeypatch, capsys):
    """Fault: one NaN gradient makes the whole model NaN, in silence."""
    poison(monkeypatch, {2, 3})
    run(data, tmp_path, "--steps", 4, "--save_every", 1, "--group_size", 6, "--eval_samples", 2)
    out = capsys.readouterr().out
    assert [f"step {n}: the gradient is not finite" in out for n in (1, 2, 3, 4)] == [False, True, True, False]
    rows = [row for row in lines(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, False]
    state = torch.load(tmp_path / "checkpoint-4/optimizer.pt", weights_only=True)
    assert {moments["step"].item() for moments in state["optimizer"]["state"].values()} == {2}
    assert all(master.isfinite().all() for master in state["masters"])
    assert weights(tmp_path, 3) != weights(tmp_path, 4)


@pytest.mark.parametrize("updates, ended", [(1, 4), (2, 3)])
def test_44_three_such_gradients_in_a_row_end_the_run(data, tmp_path, monkeypatch, updates, ended):
    """Fault: a run that has broken goes on for days, as it may where a rollout has two updates."""
    poison(monkeypatch, set(range(2, 99)))
    flags = ["--steps", 9, "--save_every", 1, "--group_size", 6, "--eval_samples", 2, "--updates_per_rollout", updates]
    with pytest.raises(BadInput, match="three gradients in a row.*--learning_rate.*--resume"):
        run(data, tmp_path, *flags)
    assert lines(tmp_path / "metrics.jsonl")[-1]["step"] == ended
    assert (tmp_path / f"checkpoint-{ended - 1}").is_dir()
