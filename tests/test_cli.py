"""The command line: flags and bounds, bad input, what a run leaves behind, what it says aloud."""

import dataclasses
import gc
import io
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
from conftest import ROOT, SCRIPTS, SMALL, TINY
from conftest import evaluation_lines, parse, read_jsonl, run, training_lines

import common
import grpo
from common import BadInput

FLAGS = """model dataset eval_dataset instruction chat_template_kwargs output_dir resume seed device
    lora_rank prompts_per_step group_size max_prompt_tokens max_new_tokens temperature
    steps learning_rate warmup_steps max_grad_norm updates_per_rollout clip_low clip_high beta
    micro_batch_tokens gradient_checkpointing
    eval_every eval_problems eval_samples eval_temperature save_every""".split()
OWN = {
    "grpo": [],
    "dr_grpo": [],
    "sign_grpo": [],
    "length_alpha": ["alpha", "scale_rewards"],
    "ep_grpo": """gate_sharpness buckets progress_weight reward_threshold entropy_gate
        zero_variance_anchor""".split(),
}
METRICS = """step reward degenerate_frac degenerate_iid completion_len truncated_frac entropy
    sampling_logp_diff loss grad_norm clip_frac kl learning_rate tokens
    seconds_rollout seconds_update""".split()
QUICK = "--eval_problems 1 --eval_samples 1".split()  # for tests that look at training only


def weights(folder, step):
    return (Path(folder) / f"checkpoint-{step}/model.safetensors").read_bytes()


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a script as the command line does, but in this process, which has imported torch."""

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
    run(data, folder, "--steps", 2, "--eval_every", 1)
    return folder


# --- flags ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_are_the_same_in_all_scripts(name):
    """Fault: a flag is missing in one of the five, has another name, or is out of order."""
    assert [field.name for field in dataclasses.fields(SCRIPTS[name].Args)] == FLAGS + OWN[name]
    shared = vars(SCRIPTS[name].Args())
    assert all(shared[flag] == value for flag, value in vars(grpo.Args()).items())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_something_about_every_flag(name, capsys):
    """Fault: a flag without a line of help."""
    with pytest.raises(SystemExit) as end:
        parse("--help", script=SCRIPTS[name])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(SCRIPTS[name].Args):
        text = field.metadata["help"]
        assert f"--{field.name}" in shown
        assert "\n" not in text and 5 < len(text) < 110
        assert "".join(text.split()) in "".join(shown.split())


def test_without_a_model_the_tiny_settings_are_used():
    """Fault: the offline default needs the network, a GPU or hours."""
    args = parse()
    assert vars(args) == vars(grpo.Args()) | grpo.TINY
    assert Path(args.model) == Path(args.dataset) == ROOT / "tests/tiny"
    assert (args.device, args.max_new_tokens, args.learning_rate) == ("cpu", 48, 3e-4)


def test_given_flags_win_over_the_tiny_settings():
    """Fault: the tiny settings overwrite what was given, at least where it is the usual default."""
    args = parse("--learning_rate", 1e-6, "--steps", 500, "--gradient_checkpointing")
    assert (args.learning_rate, args.steps, args.gradient_checkpointing) == (1e-6, 500, True)
    assert args.max_new_tokens == 48


def test_with_a_model_the_defaults_are_for_gsm8k_on_a_gpu():
    """Fault: the tiny settings leak into a real run."""
    args = parse("--model", "Qwen/Qwen2.5-3B")
    assert vars(args) == vars(grpo.Args()) | {"model": "Qwen/Qwen2.5-3B"}
    assert (args.dataset, args.learning_rate) == ("openai/gsm8k:main", 1e-6)
    assert (args.group_size, args.max_new_tokens, args.temperature) == (8, 1024, 1.0)


@pytest.mark.parametrize("model", [[], ["--model", "Qwen/Qwen2.5-3B"]])
def test_adapters_have_ten_times_the_default_learning_rate(model):
    """Fault: adapters learn ten times too slowly, or a given learning rate is multiplied too."""
    default = parse(*model).learning_rate
    assert parse(*model, "--lora_rank", 8).learning_rate == pytest.approx(10 * default)
    assert parse(*model, "--lora_rank", 8, "--learning_rate", 2e-5).learning_rate == 2e-5


def test_importing_does_nothing(tmp_path):
    """Fault: an import starts something, prints something or writes something."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


# --- bounds ---

LEAST = dict(
    seed=0, lora_rank=0, prompts_per_step=1, group_size=2, max_prompt_tokens=1, max_new_tokens=1,
    temperature=0.01, steps=0, learning_rate=0, warmup_steps=0, max_grad_norm=1e-9,
    updates_per_rollout=1, clip_low=0, clip_high=0, beta=0, micro_batch_tokens=1, eval_every=1,
    eval_problems=1, eval_samples=1, eval_temperature=0, save_every=1, alpha=0, buckets=1)
MOST = dict(alpha=1)
UNBOUNDED = ["gate_sharpness", "progress_weight", "reward_threshold"]  # also negative ones


def numbers(script):
    """The flags of a script that are numbers."""
    return [f.name for f in dataclasses.fields(script.Args) if f.type in (int, float)]


def start(tmp_path, script, flag, value):
    """What a run does first with its flags."""
    args = parse("--output_dir", tmp_path, f"--{flag}={value}", script=script)
    common.Run(args, script.__file__)


@pytest.mark.parametrize("name", SCRIPTS)
def test_4_and_6_every_number_has_its_bounds(name, tmp_path):
    """Fault: a number that makes no sense starts a run: T = 0, G = 1, minus one step, alpha 200."""
    script = SCRIPTS[name]
    assert set(numbers(script)) <= {*LEAST, *UNBOUNDED}
    for flag in numbers(script):
        kind = script.Args.__dataclass_fields__[flag].type
        for bounds, word, sign in (LEAST, "least", -1), (MOST, "most", 1):
            if flag in bounds:
                bound = kind(bounds[flag])
                start(tmp_path, script, flag, bound)
                outside = bound + sign * (1 if kind is int else max(abs(bound), 1e-9) / 10)
                with pytest.raises(BadInput, match=f"--{flag} must be at {word} {bound}, not"):
                    start(tmp_path, script, flag, outside)


def test_a_number_of_more_than_64_bits_is_refused(tmp_path):
    """Fault: an OverflowError after the model was loaded."""
    with pytest.raises(BadInput, match=f"--steps must be at most {sys.maxsize}, not"):
        start(tmp_path, grpo, "steps", 10**20)


@pytest.mark.parametrize("name", SCRIPTS)
def test_nan_is_no_setting(name, tmp_path):
    """Fault: NaN is below no bound, and every comparison with it is false."""
    script = SCRIPTS[name]
    for flag in numbers(script):
        if script.Args.__dataclass_fields__[flag].type is float:
            with pytest.raises(BadInput, match=f"--{flag} must be"):
                start(tmp_path, script, flag, "nan")


# --- bad input ---

BAD = {
    "unknown flag": (["--learning_rat", "1"], "--learning_rat"),
    "not a number": (["--steps", "many"], "--steps"),
    "half a step": (["--steps", "1.5"], "--steps"),
    "group of one": (["--group_size", "1"], "--group_size must be at least 2"),
    "temperature 0": (["--temperature", "0"], "--temperature must be at least 0.01"),
    "unknown model": (["--model", "no/such-model"], "no/such-model"),
    "missing file": (["--dataset", "no/such/file.jsonl"], "no/such/file.jsonl"),
    "missing evaluation": (["--eval_dataset", "missing.jsonl"], "missing.jsonl"),
    "nothing to resume": (["--resume"], "--resume"),
    "no cuda": (["--device", "cuda"], "--device cuda"),
    "other device": (["--device", "meta"], "--device meta"),
    "more than the memory": (["--group_size", "9" * 16], "out of memory: lower --micro_batch_tok"),
    "half an object": (["--chat_template_kwargs", '{"enable_thinking": fal'], "must be a JSON obj"),
    "a number": (["--chat_template_kwargs", "5"], "--chat_template_kwargs must be a JSON object"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(command, data, tmp_path, monkeypatch, bad):
    """Fault: a slip on the command line ends in a traceback, or starts a run nobody wanted."""
    if bad == "no cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    flags, named = BAD[bad]
    code, errors = command("grpo", *SMALL, "--dataset", data, "--output_dir", "out", *flags)
    lines = errors.splitlines()
    (said,) = [line for line in lines if "error: " in line]
    assert code == 2 and named in said and "Traceback" not in errors
    rest = [line for line in lines if line not in (said, "") and not line.startswith("usage: ")]
    assert all("[transformers]" in line or "it/s]" in line for line in rest)
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_folder_with_another_run_is_refused_and_untouched(command, finished, data):
    """Fault: a second run overwrites the first one's log and checkpoints."""
    before = contents(finished)
    for name in "grpo", "dr_grpo":
        code, errors = command(name, *SMALL, "--dataset", data, "--output_dir", finished)
        assert code == 2 and len(errors.splitlines()) == 1
        assert errors.startswith(f"error: {finished} already contains a run")
    assert contents(finished) == before


def test_51_a_folder_in_use_is_refused(data, tmp_path, monkeypatch):
    """Fault: two runs, or two resumes of one run, write into one folder and lose each other's."""
    flags = [*QUICK, "--save_every", 1]
    run(data, tmp_path, *flags, "--steps", 1)
    refused = []

    def rollout(*given, real=grpo.rollout):
        for more in [], ["--resume"]:  # while the first one is at work
            with pytest.raises(BadInput, match=f"{tmp_path} is in use: choose another") as error:
                run(data, tmp_path, *flags, "--steps", 9, *more)
            refused.append(str(error.value))
        return real(*given)

    monkeypatch.setattr(grpo, "rollout", rollout)
    run(data, tmp_path, *flags, "--steps", 2, "--resume")
    assert len(refused) >= 2
    monkeypatch.undo()
    gc.collect()  # the caught errors still hold the frames of the run
    run(data, tmp_path, *flags, "--steps", 3, "--resume")  # the folder is free again
    assert [line["step"] for line in training_lines(tmp_path)] == [1, 2, 3]


def test_51_the_folder_of_a_killed_run_is_free(data, tmp_path):
    """Fault: a lock file that a killed run leaves behind keeps everybody out."""
    code = "import fcntl; file = open('.lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX); 1 / 0"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert (tmp_path / ".lock").exists()
    run(data, tmp_path, *QUICK, "--steps", 1)


def test_an_impossible_output_folder_is_one_sentence(command, data, tmp_path):
    """Fault: a traceback where the output folder is a file."""
    (tmp_path / "file").write_text("")
    code, errors = command("grpo", *SMALL, "--dataset", data, "--output_dir", tmp_path / "file")
    assert code == 2 and errors.startswith("error: cannot write to --output_dir")


def test_a_real_process_in_another_folder(tmp_path):
    """Fault: the script works in its own folder only."""
    command = [sys.executable, str(ROOT / "length_alpha.py"), "--steps", "0", *QUICK]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(evaluation_lines(tmp_path / "runs/length_alpha")) == 1


def test_50_weights_that_are_not_finite_are_one_sentence(data, tmp_path, tiny):
    """Fault: a damaged model scores 0.000, or training is told to lower its learning rate."""
    config = transformers.AutoConfig.from_pretrained(TINY, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    for name, value in zip(names, [float("nan"), float("inf"), float("nan")]):
        good = model.state_dict()[name].clone()
        model.state_dict()[name][-1] = value  # of an embedding only the last row
        for part in model, tiny[1]:
            part.save_pretrained(tmp_path / "model")
        model.state_dict()[name].copy_(good)
        for steps in 0, 5:
            flags = ["--model", tmp_path / "model", "--device", "cpu", "--steps", steps]
            with pytest.raises(BadInput, match=f"{tmp_path}/model.* not finite"):
                run(data, tmp_path / "out", *flags)
    assert not (tmp_path / "out/metrics.jsonl").exists()


# --- what a run leaves ---


def test_a_metric_of_ones_own_is_logged(data, tmp_path, monkeypatch):
    """Fault: what policy_loss returns beside its own metrics is lost without a word."""
    policy_loss = grpo.policy_loss

    def with_metric(logps, *others):
        loss, metrics = policy_loss(logps, *others)
        mask = others[-2]
        return loss, metrics | {"mean_logp": logps.detach().where(mask, 0.0).sum() / mask.sum()}

    monkeypatch.setattr(grpo, "policy_loss", with_metric)
    # Two updates: the mean over both. The micro-batches are uneven: the mean is over tokens.
    flags = ["--micro_batch_tokens", 60, "--updates_per_rollout", 2, "--learning_rate", 0]
    run(data, tmp_path, "--steps", 1, *flags, *QUICK)
    (row,) = training_lines(tmp_path)
    assert row["mean_logp"] < 0
    batches = []
    update = grpo.update

    def watched(model, optimizer, batch, *others):
        batches.append(batch)
        return update(model, optimizer, batch, *others)

    monkeypatch.setattr(grpo, "update", watched)
    run(data, tmp_path / "again", "--steps", 1, *flags, *QUICK)
    batch = batches[0]
    assert row["mean_logp"] == pytest.approx(batch.old_logps[batch.mask].mean().item(), rel=1e-5)


def test_metrics_have_the_keys_of_the_documentation(finished):
    """Fault: a metric is missing, has another name, or is not JSON."""
    rows = read_jsonl(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 1, 2, 2]
    assert [list(row) for row in training_lines(finished)] == [METRICS] * 2
    passes = [f"eval_pass@{k}" for k in (1, 2, 4)]
    keys = ["step", "eval_accuracy", "eval_reward", *passes]
    assert [list(row) for row in evaluation_lines(finished)] == [keys] * 3
    for row in training_lines(finished):
        p = row["reward"]
        assert row["degenerate_iid"] == pytest.approx(p**4 + (1 - p) ** 4)
        assert row["degenerate_frac"] in (0, 0.25, 0.5, 0.75, 1) and row["kl"] is None
        assert row["tokens"] == row["completion_len"] * 16
        assert 0 <= row["sampling_logp_diff"] < 1e-4
    for row in evaluation_lines(finished):
        assert row["eval_accuracy"] == row["eval_reward"] == pytest.approx(row["eval_pass@1"])
        assert row["eval_pass@1"] <= row["eval_pass@2"] <= row["eval_pass@4"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_logs_the_same_and_is_copied(name, data, tmp_path):
    """Fault: one of the five does not run, or its run does not say what made it."""
    run(data, tmp_path, "--steps", 1, *QUICK, script=SCRIPTS[name])
    assert [list(line) for line in training_lines(tmp_path)] == [METRICS]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("script") == name
    assert list(config) == [*FLAGS, *OWN[name], "date"]
    assert (config["group_size"], config["learning_rate"], config["dataset"]) == (4, 3e-4, data)
    assert (tmp_path / f"{name}.py").read_bytes() == (ROOT / f"{name}.py").read_bytes()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_evaluation_file_shows_how_each_response_was_graded(finished, data, tokenizer):
    """Fault: nobody can see which answers counted as right."""
    rows = read_jsonl(finished / "eval-2.jsonl")
    problems = read_jsonl(Path(data) / "test.jsonl")
    assert [row["question"] for row in rows] == [problem["question"] for problem in problems]
    right = 0
    for row, problem in zip(rows, problems):
        assert list(row) == ["question", "answer", "samples", "rewards", "lengths"]
        assert row["answer"] == problem["answer"]
        ends = [s.endswith(f"\\boxed{{{row['answer']}}}") for s in row["samples"]]
        assert row["rewards"] == [float(end) for end in ends]
        # The stop token counts, where a response has one.
        lengths = [len(ids) + 1 for ids in tokenizer(row["samples"]).input_ids]
        assert row["lengths"] == [min(length, 24) for length in lengths]
        right += sum(row["rewards"])
    accuracy = evaluation_lines(finished)[-1]["eval_accuracy"]
    assert accuracy == pytest.approx(right / 32) and 0 < right < 32


def test_steps_0_only_evaluates(finished, data, tmp_path):
    """Fault: an evaluation trains, needs training data, or gives another number than training."""
    shutil.copy(Path(data) / "test.jsonl", tmp_path)
    test = tmp_path / "test.jsonl"
    flags = ["--model", finished / "checkpoint-2", "--device", "cpu", "--instruction", ""]
    run("unused", tmp_path / "out", *flags, "--steps", 0, "--eval_dataset", test)
    (row,) = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert row | {"step": 2} == evaluation_lines(finished)[-1] and row["step"] == 0
    assert contents(tmp_path / "out")[tmp_path / "out/eval-0.jsonl"] == (
        finished / "eval-2.jsonl").read_bytes()
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_the_default_run_learns_and_saves_a_model(tmp_path, capsys):
    """Fault: everything runs and nothing is learnt."""
    flags = "--steps 15 --eval_every 100 --eval_problems 128 --eval_samples 1".split()
    grpo.main(parse(*flags, "--output_dir", tmp_path))
    before, after = evaluation_lines(tmp_path)
    assert before["eval_accuracy"] <= 0.55 and after["eval_accuracy"] >= 0.8
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-15")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint-15")
    ids = tokenizer("3+8+4=", return_tensors="pt").input_ids
    more = dict(do_sample=False, repetition_penalty=1.0, max_new_tokens=48)
    text = tokenizer.decode(model.generate(ids, **more)[0])
    assert text.startswith("3+8+4=3+8=11;11+4=15;\\boxed{15}")
    out = capsys.readouterr().out
    assert "step 1, reward" in out and "step 0: eval_accuracy" in out
    last = out.splitlines()[-1]
    assert last.startswith(f"{tmp_path} is at step 15: ") and "--resume" in last


# --- evaluation ---


@pytest.mark.parametrize("training", ["--temperature 1", "--temperature 0.5"])
def test_63_greedy_evaluation(data, tmp_path, training):
    """Fault: the temperature of an evaluation is that of training, and greedy is refused."""
    flags = [*training.split(), "--eval_samples", 4, "--eval_problems", 3, "--steps", 0]
    run(data, tmp_path / "greedy", *flags, "--eval_temperature", 0)
    (row,) = evaluation_lines(tmp_path / "greedy")
    assert list(row) == ["step", "eval_accuracy", "eval_reward", "eval_pass@1"]
    model, tokenizer = common.load_model(str(TINY), "cpu")
    for line in read_jsonl(tmp_path / "greedy/eval-0.jsonl"):
        ids = tokenizer(line["question"], return_tensors="pt").input_ids
        plain = dict(do_sample=False, repetition_penalty=1.0, max_new_tokens=24)
        ids = model.generate(ids, **plain)[0, ids.shape[1] :]
        assert line["samples"] == [tokenizer.decode(ids, skip_special_tokens=True)]


def test_63_an_evaluation_at_another_temperature_leaves_training_alone(data, tmp_path):
    """Fault: --eval_temperature reaches training, or does not reach the evaluation."""
    for name, more in ("own", []), ("same", [1.0]), ("cold", [0]):
        flags = ["--eval_temperature", *more] if more else []
        run(data, tmp_path / name, "--steps", 1, "--eval_problems", 4, *flags)
    assert weights(tmp_path / "own", 1) == weights(tmp_path / "cold", 1)
    assert evaluation_lines(tmp_path / "own") == evaluation_lines(tmp_path / "same")
    assert evaluation_lines(tmp_path / "own") != evaluation_lines(tmp_path / "cold")


def test_more_eval_samples_than_rows_in_a_batch_change_nothing(data, tmp_path, monkeypatch):
    """Fault: an evaluation needs more memory than training, or its parts get other random draws."""
    sizes = []

    def rollout(model, tokenizer, problems, samples, *rest, real=grpo.rollout):
        sizes.append(len(problems) * samples)
        return real(model, tokenizer, problems, samples, *rest)

    monkeypatch.setattr(grpo, "rollout", rollout)
    found = {}
    for P in 1, 2, 16:  # four times P G rows: 8, 16, 128
        sizes.clear()
        flags = ["--group_size", 2, "--prompts_per_step", P, "--eval_samples", 11]
        run(data, tmp_path / str(P), *flags, "--steps", 0, "--eval_problems", 3)
        assert max(sizes) <= 8 * P
        found[P] = evaluation_lines(tmp_path / str(P)), read_jsonl(tmp_path / f"{P}/eval-0.jsonl")
    assert sizes == [33]
    assert found[1] == found[2] == found[16]
    assert [len(line["samples"]) for line in found[1][1]] == [11] * 3


# --- rewards of one's own ---


@pytest.fixture
def pool(tmp_path):
    """Problems with more columns than a question and an answer."""
    folder = tmp_path / "pool"
    folder.mkdir()
    for name, count in ("train", 8), ("test", 3):
        rows = [{"question": f"{i}+1=", "answer": str(i + 1), "id": i, "nums": [i, 1],
                 "level": {"grade": i / 2}} for i in range(count)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_compute_reward_sees_every_column_and_the_length(pool, tmp_path, monkeypatch):
    """Fault: a reward that needs more than the answer needs changes all over the script."""
    seen = []
    batches = []

    def compute_reward(text, problem, length):
        seen.append((text, problem, length))
        return 0.0

    def rollout(*given, real=grpo.rollout):
        batches.append(real(*given))
        return batches[-1]

    monkeypatch.setattr(grpo, "compute_reward", compute_reward)
    monkeypatch.setattr(grpo, "rollout", rollout)
    run(pool, tmp_path / "out", "--steps", 1, "--eval_samples", 2)
    assert len(seen) == 2 * 3 * 2 + 16  # two evaluations, one step
    for text, problem, length in seen:
        i = problem["id"]
        assert type(length) is int and type(text) is str
        assert problem["nums"] == [i, 1] and problem["level"] == {"grade": i / 2}
        assert (problem["question"], problem["answer"]) == (f"{i}+1=", str(i + 1))
    texts = [text for batch in batches for text in batch.texts]
    lengths = [n for batch in batches for n in batch.mask.sum(1).tolist()]
    assert [(text, length) for text, _, length in seen] == list(zip(texts, lengths))


def test_a_length_bonus_is_nowhere_an_integer(data, tmp_path, monkeypatch, capsys):
    """Fault: rewards other than 0 and 1 are floored, counted as wrong, or shown as 0."""

    def compute_reward(text, problem, length):
        return grpo.verify(text, problem["answer"]) + 0.25 * (1 - length / 24)

    monkeypatch.setattr(grpo, "compute_reward", compute_reward)
    run(data, tmp_path, "--steps", 2, "--eval_every", 1, "--eval_problems", 4)
    for row in training_lines(tmp_path):
        assert row["degenerate_iid"] is None
        assert row["reward"] * 64 * 24 % 64 != 0 and row["grad_norm"] > 0
    for row in evaluation_lines(tmp_path):
        rows = read_jsonl(tmp_path / f"eval-{row['step']}.jsonl")
        rewards = [reward for line in rows for reward in line["rewards"]]
        lengths = [length for line in rows for length in line["lengths"]]
        right = [reward >= 1 for reward in rewards]
        expected = [r + 0.25 * (1 - n / 24) for r, n in zip(right, lengths)]
        assert rewards == pytest.approx(expected) and 0 < sum(right) < 16
        assert row["eval_accuracy"] == pytest.approx(sum(right) / 16)
        assert row["eval_reward"] == pytest.approx(sum(rewards) / 16)
        assert row["eval_pass@1"] == row["eval_accuracy"]
    out = capsys.readouterr().out
    assert f"eval_reward {evaluation_lines(tmp_path)[0]['eval_reward']:.3f}" in out
    printed = [line.split("reward ")[1].split(":")[0] for line in out.splitlines()
               if ", reward " in line]  # fmt: skip
    assert len(printed) == 2 and all("." in number for number in printed)


@pytest.mark.parametrize("returned", [
    None, float("nan"), float("inf"), -float("inf"), "1.0", [1.0], {"reward": 1},
    torch.tensor(float("nan")), torch.ones(3), 1e300,
], ids=repr)  # fmt: skip
def test_15_a_reward_that_is_not_a_finite_number_is_named(data, tmp_path, monkeypatch, returned):
    """Fault: one reward of None or NaN becomes 0, or NaN weights, or a traceback."""
    monkeypatch.setattr(grpo, "compute_reward", lambda text, problem, length: returned)
    with pytest.raises(BadInput, match=r"^compute_reward returned .*not a finite number$"):
        run(data, tmp_path, "--steps", 1)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("returned", [1, True, torch.tensor(1.0), torch.tensor([0.5])], ids=repr)
def test_15_any_finite_number_is_a_reward(data, tmp_path, monkeypatch, returned):
    """Fault: a reward that is an int, a bool or one element of a tensor ends the run."""
    monkeypatch.setattr(grpo, "compute_reward", lambda text, problem, length: returned)
    run(data, tmp_path, "--steps", 1, *QUICK)
    assert training_lines(tmp_path)[0]["reward"] == float(returned)


SHAPES = {
    "a column": (lambda x: x[:, :1], r"shape \(16, 1\)"),
    "one per response": (lambda x: x[:, 0], r"shape \(16,\)"),
    "groups": (lambda x: x[:, 0].view(4, 4), r"shape \(4, 4\)"),
    "transposed": (lambda x: x.T, r"shape \(\d+, 16\)"),
    "a number": (lambda x: x.sum(), r"shape \(\)"),
    "nothing": (lambda x: None, "None"),
    "a list": (lambda x: [1.0], r"\[1.0\]"),
    "a long list": (lambda x: [1.0] * 999, r"\[[1.0, ]{59}, but"),
}


@pytest.mark.parametrize("wrong", SHAPES)
@pytest.mark.parametrize("function", ["compute_advantages", "compute_weights"])
def test_a_wrong_shape_is_named_with_the_right_one(data, tmp_path, monkeypatch, function, wrong):
    """Fault: (B, 1) advantages broadcast in silence, or a shape error far from its cause."""
    change, named = SHAPES[wrong]
    real = getattr(grpo, function)
    monkeypatch.setattr(grpo, function, lambda batch, args: change(real(batch, args)))
    with pytest.raises(BadInput, match=rf"^{function} returned.*{named}.*\(16, \d+\)$"):
        run(data, tmp_path, *QUICK, "--steps", 1)


@pytest.mark.parametrize("function", ["compute_advantages", "compute_weights"])
def test_an_advantage_that_is_not_finite_is_named(data, tmp_path, monkeypatch, function):
    """Fault: 0 / 0 in a group is called a diverged model, and its steps are skipped."""
    real = getattr(grpo, function)
    monkeypatch.setattr(grpo, function, lambda batch, args: real(batch, args) / 0)
    with pytest.raises(BadInput, match=f"^{function} returned NaN or inf for a response token$"):
        run(data, tmp_path / "all", *QUICK, "--steps", 1)
    off = lambda batch, args: real(batch, args).where(batch.mask, float("nan"))  # noqa: E731
    monkeypatch.setattr(grpo, function, off)
    run(data, tmp_path / "off", *QUICK, "--steps", 1)


def test_a_response_taken_out_of_the_mask_trains_nothing(data, tmp_path, monkeypatch):
    """Fault: the columns of responses off the mask shift the tokens of all the others."""

    def compute_advantages(batch, args, real=grpo.compute_advantages):
        batch.mask[batch.mask.sum(1) == batch.mask.sum(1).max()] = False
        return real(batch, args)

    monkeypatch.setattr(grpo, "compute_advantages", compute_advantages)
    run(data, tmp_path, *QUICK, "--steps", 1)
    assert training_lines(tmp_path)[0]["sampling_logp_diff"] < 1e-4


def test_a_flag_of_ones_own_needs_no_arg(monkeypatch, capsys):
    """Fault: a field without arg() is a KeyError, and a % in its help a TypeError."""

    @dataclasses.dataclass
    class Args(grpo.Args):
        threshold: float = 0.5
        share: float = common.arg(0.1, "the top 10% of all")

    assert common.check_flags(common.parse_args(Args, grpo.TINY, []), 1) is None
    with pytest.raises(SystemExit):
        common.parse_args(Args, grpo.TINY, ["--help"])
    assert "the top 10% of all" in capsys.readouterr().out


# --- nothing silent ---


def test_53_a_console_that_cannot_show_a_character(tmp_path, monkeypatch):
    """Fault: a question with a sign that is not latin-1 ends the run in its middle."""
    rows = [{"question": "中 ≈ 3+4=", "answer": "7"}] * 4
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    streams = {name: io.TextIOWrapper(io.BytesIO(), "latin-1") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    flags = [*SMALL, "--dataset", tmp_path, "--output_dir", tmp_path / "out", "--steps", 1]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *map(str, flags)])
    common.run_script(grpo.main, grpo.Args, grpo.TINY)
    monkeypatch.undo()
    streams["stdout"].flush()
    shown = streams["stdout"].buffer.getvalue().decode("latin-1")
    assert "? ? 3+4=" in shown and len(training_lines(tmp_path / "out")) == 1


def test_44_every_response_cut_off_is_said(data, tmp_path):
    """Fault: no response ever ends, every reward is 0, and nobody is told why."""
    with pytest.warns(UserWarning, match="every response was cut off.*--max_new_tokens"):
        run(data, tmp_path, "--steps", 1, "--max_new_tokens", 2)
    assert training_lines(tmp_path)[0]["truncated_frac"] == 1


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_44_twenty_steps_without_variance_are_said(data, tmp_path, monkeypatch, reward):
    """Fault: a run continues for hours without any signal, and nobody is told."""
    monkeypatch.setattr(grpo, "compute_reward", lambda text, problem, length: reward)
    small = [*"--prompts_per_step 1 --group_size 2 --max_new_tokens 2".split(), *QUICK]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(data, tmp_path, *small, "--steps", 21, "--save_every", 99)
    (said,) = [str(w.message) for w in said if "any advantage" in str(w.message)][:1]
    assert "any advantage: 20;" in said and "--group_size" in said


@pytest.mark.parametrize("function", ["compute_advantages", "compute_weights"])
def test_17_a_step_without_signal_moves_nothing(data, tmp_path, monkeypatch, function):
    """Fault: Adam's momentum moves the weights on a step whose advantages or weights are zero."""
    calls = []

    def compute(batch, args, real=getattr(grpo, function)):
        calls.append(batch)
        return real(batch, args) * (len(calls) == 1)

    monkeypatch.setattr(grpo, function, compute)
    flags = [*QUICK, "--steps", 3, "--save_every", 1, "--updates_per_rollout", 2]
    run(data, tmp_path, *flags)
    assert weights(tmp_path, 2) == weights(tmp_path, 3) != (TINY / "model.safetensors").read_bytes()
    assert [line["grad_norm"] > 0 for line in training_lines(tmp_path)] == [True, False, False]
    old, new = (
        torch.load(tmp_path / f"checkpoint-{step}/optimizer.pt", weights_only=True)["adamw"]
        for step in (2, 3)
    )
    for a, b in zip(old["state"].values(), new["state"].values(), strict=True):
        assert a["step"].item() == b["step"].item() == 2  # the updates of the first rollout
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and a["exp_avg"].any()


def test_50_weights_that_are_not_finite_are_not_saved(data, tmp_path):
    """Fault: a learning rate of 1e10 ends with a checkpoint of NaN, and without a word."""
    with pytest.raises(BadInput, match="diverged: lower --learning_rate, then --resume"):
        run(data, tmp_path, *QUICK, "--steps", 1, "--learning_rate", 1e10)
    assert common.saved_steps(tmp_path) == []
    run(data, tmp_path, *QUICK, "--steps", 1, "--resume")
    assert common.saved_steps(tmp_path) == [1]


def poison(monkeypatch, steps):
    """Make the losses of these steps NaN."""
    step = 0

    def update(model, optimizer, batch, advantages, weights, number, args, real=grpo.update):
        nonlocal step
        step = number
        return real(model, optimizer, batch, advantages, weights, number, args)

    def policy_loss(*given, real=grpo.policy_loss):
        loss, metrics = real(*given)
        return loss * (float("nan") if step in steps else 1), metrics

    monkeypatch.setattr(grpo, "update", update)
    monkeypatch.setattr(grpo, "policy_loss", policy_loss)


def test_44_a_gradient_that_is_not_finite_is_skipped_and_said(data, tmp_path, monkeypatch, capsys):
    """Fault: one NaN gradient makes the whole model NaN, in silence."""
    poison(monkeypatch, {2, 3})
    run(data, tmp_path, *QUICK, "--steps", 4, "--save_every", 1, "--group_size", 6)
    out = capsys.readouterr().out
    said = [f"step {n}: gradient not finite" in out for n in (1, 2, 3, 4)]
    assert said == [False, True, True, False]
    lines = training_lines(tmp_path)
    assert [line["grad_norm"] is None for line in lines] == [False, True, True, False]
    state = torch.load(tmp_path / "checkpoint-4/optimizer.pt", weights_only=True)
    assert {moments["step"].item() for moments in state["adamw"]["state"].values()} == {2}
    assert all(master.isfinite().all() for master in state["masters"])
    assert weights(tmp_path, 3) != weights(tmp_path, 4)


@pytest.mark.parametrize("updates", [1, 2])
def test_44_three_such_steps_in_a_row_end_the_run(data, tmp_path, monkeypatch, updates):
    """Fault: a broken run continues for days."""
    poison(monkeypatch, set(range(2, 99)))
    flags = [*QUICK, "--steps", 9, "--save_every", 1, "--updates_per_rollout", updates]
    with pytest.raises(BadInput, match="diverged.*--learning_rate.*--resume"):
        run(data, tmp_path, *flags, "--group_size", 6)
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 4
    assert (tmp_path / "checkpoint-3").is_dir()
