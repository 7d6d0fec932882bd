"""A resumed run is the same run: checkpoints, kills, broken ones, changed flags, full disks."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
import transformers
from conftest import ROOT, SCRIPTS, TINY, evaluation_lines, parse, read_jsonl, training_lines

import common
import grpo
from common import BadInput

FLAGS = "--eval_every 3 --eval_problems 8 --eval_samples 2 --save_every 1".split()


def run(data, folder, *flags, script=grpo):
    conftest.run(data, folder, *FLAGS, *flags, script=script)


def metrics(folder):
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flat(value):
    if isinstance(value, dict):
        return [x for key in sorted(value, key=str) for x in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [value]


def assert_same_run(a, b, step):
    assert metrics(a) == metrics(b)
    weights = [(run / f"checkpoint-{step}/model.safetensors").read_bytes() for run in (a, b)]
    assert weights[0] == weights[1]
    states = [torch.load(run / f"checkpoint-{step}/optimizer.pt", weights_only=True)
              for run in (a, b)]  # fmt: skip
    for x, y in zip(*map(flat, states), strict=True):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y
    evals = [{path.name: path.read_bytes() for path in run.glob("eval-*.jsonl")} for run in (a, b)]
    assert evals[0] == evals[1] and len(evals[0]) > 1


ALGORITHMS = {"grpo": ["--beta", "0.04"], "ep_grpo": ["--progress_weight", "1"]}


@pytest.fixture(scope="module", params=ALGORITHMS)
def straight(request, data, tmp_path_factory):
    """A run of six steps without a break."""
    folder = tmp_path_factory.mktemp("straight")
    script = SCRIPTS[request.param]
    flags = [*ALGORITHMS[request.param], "--save_every", 3]
    run(data, folder, *flags, "--steps", 6, script=script)
    return script, flags, folder


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    """A run of two steps that saved both; copy it before a change."""
    folder = tmp_path_factory.mktemp("two")
    run(data, folder, "--steps", 2)
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    """A copy of two_steps."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


# --- the same run ---


def test_34_and_35_three_steps_and_a_resume_are_six_steps(straight, data, tmp_path, capsys):
    """Fault: the resumed run draws other samples, meets other problems, lost Adam's moments, or
    takes the checkpoint for the reference, which both algorithms here measure their distance to."""
    script, flags, whole = straight
    run(data, tmp_path, *flags, "--steps", 3, script=script)
    capsys.readouterr()
    run(data, tmp_path, *flags, "--steps", 6, "--resume", script=script)
    out = capsys.readouterr().out
    assert "--steps changed: 3 -> 6" in out and f"continuing from {tmp_path}/checkpoint-3" in out
    assert_same_run(whole, tmp_path, 6)
    if script is grpo:
        lines = training_lines(whole)
        assert lines[0]["kl"] == 0 and lines[-1]["kl"] > 0  # at first, and then no more


def test_35_the_reference_is_the_model_the_run_began_with(data, tmp_path, monkeypatch):
    """Fault: after a resume the checkpoint is the reference, and the penalty starts at 0 again."""
    run(data, tmp_path, "--steps", 1, "--beta", 0.1)
    loaded = []

    def load_model(name, *given, real=common.load_model, **more):
        loaded.append(Path(name).name)
        return real(name, *given, **more)

    monkeypatch.setattr(common, "load_model", load_model)
    run(data, tmp_path, "--steps", 2, "--beta", 0.1, "--resume")
    assert loaded == ["checkpoint-1", "tiny"]
    assert training_lines(tmp_path)[1]["kl"] > 0


PAST = [
    '{"step": 3, "re{"step": 3, "x": 1}',
    '{"step": 3, "x": 1}\n{"step": 4, "x', '{"step": 3, "x', '{"step": 3, "x": {}', '3', '{"x": 1}',
    '{"step": null}', "\0\0\0}"]  # fmt: skip


@pytest.mark.parametrize("past", PAST)
def test_34_metrics_past_the_checkpoint_and_half_a_line_are_dropped(copied, data, past):
    """Fault: the steps that are taken again are in the log twice, or half a line breaks it."""
    before = metrics(copied)
    with open(copied / "metrics.jsonl", "a") as file:
        file.write(past)
    run(data, copied, "--steps", 3, "--resume")
    after = metrics(copied)
    assert after[: len(before)] == before
    assert [line["step"] for line in after[len(before) :]] == [3, 3]


def test_34_lines_in_another_spelling_are_kept(copied, data):
    """Fault: valid lines are dropped since another program has written them again."""
    path = copied / "metrics.jsonl"
    before = metrics(copied)
    path.write_text("".join(json.dumps(x, separators=(",", ":")) + " \n" for x in before))
    run(data, copied, "--steps", 3, "--resume")
    assert metrics(copied)[: len(before)] == before


def test_34_steps_taken_again_are_the_same_steps(two_steps, copied, data):
    """Fault: what is logged once more after a lost checkpoint differs from the first time."""
    shutil.rmtree(copied / "checkpoint-2")
    run(data, copied, "--steps", 2, "--resume")
    assert_same_run(two_steps, copied, 2)


def test_34_a_deleted_log_begins_anew(copied, data):
    """Fault: a resume without metrics.jsonl ends in FileNotFoundError."""
    (copied / "metrics.jsonl").unlink()
    run(data, copied, "--steps", 3, "--resume")
    assert [line["step"] for line in training_lines(copied)] == [3]


# --- killed ---


def harness(mode, work, data):
    flags = [*conftest.SMALL, *FLAGS, "--dataset", data, *"--eval_every 2 --steps 4".split()]
    flags += "--eval_problems 1 --eval_samples 1".split()
    script = ROOT / "tests/tools/kill_harness.py"
    result = subprocess.run(
        [sys.executable, str(script), mode, " ".join(flags), str(work)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_36_killed_at_twenty_moments_nothing_saved_is_lost(data, tmp_path):
    """Fault: a kill, above all one inside a save, loses a saved checkpoint or changes the run."""
    runs, kills, kills_in_save = json.loads(harness("kills", tmp_path, data).splitlines()[-1])
    assert kills == 20 and kills_in_save >= 8 and runs >= 2
    assert any(line["grad_norm"] > 0 for line in training_lines(tmp_path / "counted"))
    for number in range(runs):
        assert_same_run(tmp_path / "counted", tmp_path / f"run-{number}", 4)


def test_36_a_full_disk_while_saving_ends_with_a_sentence(data, tmp_path):
    """Fault: a traceback, or a broken checkpoint in the place of a complete one."""
    harness("full_disk", tmp_path, data)
    for name in "weights", "state":
        error = (tmp_path / f"{name}.txt").read_text()
        assert f"cannot save {tmp_path}/{name}/checkpoint-2" in error
        assert "--resume" in error and "\n" not in error
        assert common.saved_steps(tmp_path / name) == [1]
        assert common.find_checkpoint(tmp_path / name)[1] == 1
        assert not (tmp_path / name / "checkpoint.tmp").exists()  # it would fill the disk


def test_ctrl_c_says_how_to_continue(data, tmp_path):
    """Fault: Ctrl-C ends in a traceback."""
    flags = [*conftest.SMALL, "--dataset", data, "--output_dir", "a run", "--steps", "9999"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "grpo.py"), *flags], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Shells make background jobs ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    log = tmp_path / "a run/metrics.jsonl"
    while process.poll() is None and not (log.exists() and '"loss"' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 130 and "Traceback" not in errors
    assert "interrupted" in last and "--resume" in last


# --- broken checkpoints ---


def write_checkpoint(folder, model, tokenizer):
    """A checkpoint of step 1 without an optimizer's state."""
    optimizer = SimpleNamespace(state_dict=dict)
    common.Run(parse("--output_dir", folder), "grpo.py").save(1, model, tokenizer, optimizer)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))  # as after a power cut


DAMAGES = {
    "half the weights": lambda folder: truncate(folder / "model.safetensors"),
    "zeros for the weights": lambda folder: zeros(folder / "model.safetensors"),
    "half the optimizer": lambda folder: truncate(folder / "optimizer.pt"),
    "zeros for the optimizer": lambda folder: zeros(folder / "optimizer.pt"),
    "zeros for the adapters": lambda folder: (
        (folder / "adapters").mkdir(), (folder / "adapters/x.safetensors").write_bytes(bytes(99))),
    "half the sizes": lambda folder: truncate(folder / "whole.json"),
    "zeros for the settings": lambda folder: zeros(folder / "config.json"),
    "zeros for the tokenizer": lambda folder: zeros(folder / "tokenizer.json"),
    "no sizes": lambda folder: (folder / "whole.json").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a link to nowhere": lambda folder: (
        folder.rename(folder.with_name("moved")),
        folder.symlink_to("nowhere"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_36_a_broken_newest_checkpoint_is_skipped_and_said(copied, capsys, damage):
    """Fault: a half-written checkpoint is loaded, crashes the resume, or is skipped in silence."""
    DAMAGES[damage](copied / "checkpoint-2")
    found = common.find_checkpoint(copied)
    assert found == (copied / "checkpoint-1", 1)
    out = capsys.readouterr().out
    assert f"{copied}/checkpoint-2 is incomplete: skipped" in out
    assert f"continuing from {copied}/checkpoint-1" in out


def test_36_after_a_broken_checkpoint_the_run_is_the_same(two_steps, copied, data):
    """Fault: what a broken checkpoint leaves behind changes the run, or is in the way of a save."""
    DAMAGES["half the weights"](copied / "checkpoint-2")
    run(data, copied, "--steps", 2, "--resume")
    assert_same_run(two_steps, copied, 2)


def test_36_without_a_complete_checkpoint_it_says_so_and_starts_again(
    two_steps, copied, data, capsys
):
    """Fault: nothing to continue from, and it crashes, or starts again without a word."""
    for number in 1, 2:
        truncate(copied / f"checkpoint-{number}/model.safetensors")
    run(data, copied, "--steps", 2, "--resume")
    assert "no complete checkpoint: starting from step 0" in capsys.readouterr().out
    assert_same_run(two_steps, copied, 2)


def test_36_a_checkpoint_that_may_not_be_read_is_not_a_broken_one(copied, data, monkeypatch):
    """Fault: with the rights missing for a moment the run starts again and empties its log."""

    def load_state(folder):
        raise PermissionError(13, "Permission denied", str(folder / "optimizer.pt"))

    monkeypatch.setattr(common, "load_state", load_state)
    before = (copied / "metrics.jsonl").read_text()
    with pytest.raises(BadInput, match="cannot read .*checkpoint-2.*Permission denied"):
        run(data, copied, "--steps", 3, "--resume")
    assert (copied / "metrics.jsonl").read_text() == before


def test_36_too_little_memory_is_not_a_broken_checkpoint(copied, data, monkeypatch):
    """Fault: a host without memory counts the checkpoint as broken, and the run starts again."""
    before = contents(copied)

    def load(*given, **more):
        raise RuntimeError("unable to mmap 300 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(BadInput, match="not enough memory .*checkpoint-2/optimizer.pt"):
        run(data, copied, "--steps", 3, "--resume")
    assert contents(copied) == before


def test_36_only_the_last_two_checkpoints_are_kept(data, tmp_path):
    """Fault: the disk fills up with checkpoints, or the one to fall back to is gone."""
    run(data, tmp_path, "--steps", 3)
    assert common.saved_steps(tmp_path) == [2, 3]
    assert len(list(tmp_path.glob("checkpoint*"))) == 2


def test_36_checkpoints_are_ordered_by_number(tmp_path):
    """Fault: checkpoint-100 sorts before checkpoint-20."""
    for name in "checkpoint-100", "checkpoint-20", "checkpoint-3", "checkpoint.tmp":
        (tmp_path / name).mkdir()
    assert common.saved_steps(tmp_path) == [3, 20, 100]


def test_36_checkpoints_saved_under_a_broken_higher_one_are_kept(copied, data):
    """Fault: only the highest numbers are kept, so beside broken ones a new one is deleted."""
    for step in 1, 2:
        (copied / f"checkpoint-{step}").rename(copied / f"checkpoint-{step + 7}")
        (copied / f"checkpoint-{step + 7}/optimizer.pt").write_bytes(b"")
    run(data, copied, "--steps", 1, "--resume")
    assert (copied / "checkpoint-1").is_dir()


def test_36_a_copy_under_another_name_is_left_alone(copied, data):
    """Fault: checkpoint-best, the user's own copy, crashes the resume or is deleted."""
    shutil.copytree(copied / "checkpoint-2", copied / "checkpoint-best")
    run(data, copied, "--steps", 4, "--resume")
    names = {path.name for path in copied.glob("checkpoint-*")}
    assert names == {"checkpoint-3", "checkpoint-4", "checkpoint-best"}


def test_36_a_folder_in_a_checkpoint_has_no_size_to_compare(tmp_path):
    """Fault: a folder's size is the file system's, so a checkpoint copied elsewhere is broken."""
    model, tokenizer = common.load_model(str(TINY), "cpu")
    # Several templates are saved in a folder of their own.
    tokenizer.chat_template = {"default": "{{ messages }}", "other": "{{ messages }}"}
    write_checkpoint(tmp_path, model, tokenizer)
    folders = {path.name for path in (tmp_path / "checkpoint-1").iterdir() if path.is_dir()}
    sizes = json.loads((tmp_path / "checkpoint-1/whole.json").read_text())["sizes"]
    assert folders and not folders & sizes.keys() and "model.safetensors" in sizes


def test_56_a_linked_old_checkpoint(two_steps, copied, data, tmp_path):
    """Fault: an old checkpoint, moved to a larger disk and linked, ends the run at every save."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for step in 1, 2:
        (copied / f"checkpoint-{step}").rename(disk / f"checkpoint-{step}")
        (copied / f"checkpoint-{step}").symlink_to(disk / f"checkpoint-{step}")
    before = contents(disk)
    run(data, copied, "--steps", 4, "--resume")
    assert common.saved_steps(copied) == [3, 4]
    assert contents(disk) == before  # the link is gone, not what it leads to


def test_56_a_checkpoint_that_cannot_be_removed_is_a_warning(copied, data, monkeypatch):
    """Fault: a file that somebody holds open in an old checkpoint ends the run at every save."""

    def rmtree(folder, *given, real=shutil.rmtree, **more):
        if Path(folder).name == "checkpoint-1":
            raise OSError(16, "Device or resource busy")
        real(folder, *given, **more)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.warns(UserWarning, match="cannot remove .*checkpoint-1: .*busy"):
        run(data, copied, "--steps", 4, "--resume")
    assert common.saved_steps(copied) == [1, 3, 4]


# --- what is saved is what came ---


def saved_settings(folder):
    """The settings in a model's folder, without what transformers writes about itself."""
    names = "config.json", "generation_config.json", "tokenizer_config.json"
    files = {name: json.loads((folder / name).read_text()) for name in names}
    for settings in files.values():
        for key in "transformers_version", "tokenizer_class":
            settings.pop(key, None)
    return files


def save(model, folder, **generation):
    """Save a model with settings for generation, and the tiny tokenizer without a pad token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = None
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.1, top_k=50, repetition_penalty=1.05,
        eos_token_id=tokenizer.eos_token_id, **generation)  # fmt: skip
    for part in model, tokenizer:
        part.save_pretrained(folder)
    assert common.load_model(str(folder), "cpu")[1].pad_token == tokenizer.eos_token
    return saved_settings(folder)


@pytest.mark.parametrize("flags", [[], ["--lora_rank", "2"]], ids=["weights", "adapters"])
def test_58_a_model_with_dropout_is_saved_as_it_came(data, tmp_path, flags):
    """Fault: dropouts of 0, another pad token or no cache, which a run needs, are saved too."""
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=128, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.1,
        embd_pdrop=0.2, resid_pdrop=0.3, bos_token_id=0, eos_token_id=1)  # fmt: skip
    came = save(transformers.GPT2LMHeadModel(config), tmp_path / "gpt2")
    assert came["config.json"]["attn_pdrop"] == 0.1
    flags += ["--model", tmp_path / "gpt2", "--device", "cpu", "--eval_problems", 1]
    run(data, tmp_path / "run", *flags, "--steps", 1)
    run(data, tmp_path / "run", *flags, "--steps", 2, "--resume")
    assert saved_settings(tmp_path / "run/checkpoint-2") == came


def test_58_a_router_with_jitter_is_saved_as_it_came(tmp_path):
    """Fault: as above, for the noise of a mixture of experts."""
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, router_jitter_noise=0.1,
        attention_dropout=0.1)  # fmt: skip
    came = save(transformers.MixtralForCausalLM(config), tmp_path / "model")
    model, tokenizer = common.load_model(str(tmp_path / "model"), "cpu")
    assert model.config.router_jitter_noise == 0
    write_checkpoint(tmp_path, model, tokenizer)
    assert saved_settings(tmp_path / "checkpoint-1") == came
    assert came["config.json"]["router_jitter_noise"] == 0.1
    assert model.config.router_jitter_noise == 0  # and the run continues without it
    assert tokenizer.pad_token == tokenizer.eos_token


# --- changed flags ---


def test_34_changed_flags_are_named_and_obeyed(copied, data, capsys):
    """Fault: another flag at a resume passes in silence, or the checkpoint overwrites it."""
    run(data, copied, "--steps", 3, "--resume", "--learning_rate", 1e-5, "--max_grad_norm", 0.5)
    out = capsys.readouterr().out
    assert "--learning_rate changed: 0.0003 -> 1e-05" in out
    assert "--max_grad_norm changed: 1.0 -> 0.5" in out
    assert "--output_dir changed" not in out and "--resume changed" not in out
    state = torch.load(copied / "checkpoint-3/optimizer.pt", weights_only=True)
    assert state["adamw"]["param_groups"][0]["lr"] == 1e-5
    assert json.loads((copied / "config.json").read_text())["max_grad_norm"] == 0.5


CHANGES = {
    "model": ["--model", "elsewhere"],
    "dataset": ["--dataset", "elsewhere"],
    "seed": ["--seed", "7"],
    "group_size": ["--group_size", "2"],
    "prompts_per_step": ["--prompts_per_step", "2"],
    "instruction": ["--instruction", "Be brief."],
    "chat_template_kwargs": ["--chat_template_kwargs", '{"enable_thinking": false}'],
    "max_prompt_tokens": ["--max_prompt_tokens", "7"],
    "lora_rank": ["--lora_rank", "2"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_34_flags_that_make_another_run_are_refused(two_steps, data, change):
    """Fault: a resume with another model, dataset, seed or group size counts as the same run."""
    before = contents(two_steps)
    with pytest.raises(BadInput, match=rf"another one.*{change}"):
        run(data, two_steps, "--steps", 3, "--resume", *CHANGES[change])
    assert contents(two_steps) == before


def test_34_another_script_is_refused(two_steps, data):
    """Fault: another algorithm continues this one's run."""
    before = contents(two_steps)
    with pytest.raises(BadInput, match="script.*grpo -> ep_grpo"):
        run(data, two_steps, "--steps", 3, "--resume", script=SCRIPTS["ep_grpo"])
    assert contents(two_steps) == before


def test_34_resume_without_a_run_is_refused(data, tmp_path):
    """Fault: --resume with nothing there starts from scratch, perhaps after a slip in its name."""
    with pytest.raises(BadInput, match="--resume: there is no run in"):
        run(data, tmp_path / "nothing", "--resume")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("text", ['{"script": ', "[]", "5", '["ab", "cd", 3]'])
def test_34_a_damaged_config_is_one_sentence(copied, data, text):
    """Fault: a traceback out of json."""
    (copied / "config.json").write_text(text)
    with pytest.raises(BadInput, match="--resume"):
        run(data, copied, "--steps", 3, "--resume")


def test_34_config_is_replaced_whole(copied, data, tmp_path):
    """Fault: a kill while config.json is written anew leaves a run that cannot be resumed."""
    before = (copied / "config.json").read_text()
    os.link(copied / "config.json", tmp_path / "linked")
    run(data, copied, "--steps", 3, "--resume")
    assert (tmp_path / "linked").read_text() == before  # so the file was not written into
    assert json.loads((copied / "config.json").read_text())["steps"] == 3


def test_36_a_folder_with_checkpoints_is_another_run_even_without_metrics(copied, data):
    """Fault: the log was deleted, and a new run loses its checkpoints to the old, higher ones."""
    (copied / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="already contains a run"):
        run(data, copied, "--steps", 1)


@pytest.mark.parametrize("older", [b"# an older version\n", b"\xff"])
def test_34_an_edited_script_is_named(copied, data, capsys, older):
    """Fault: the algorithm was edited between start and resume, and nobody is told."""
    (copied / "grpo.py").write_bytes(older)
    run(data, copied, "--steps", 3, "--resume")
    assert "grpo.py has been edited" in capsys.readouterr().out
    assert (copied / "grpo.py").read_bytes() == (ROOT / "grpo.py").read_bytes()


def test_34_fewer_steps_than_were_taken_is_one_sentence(two_steps, data):
    """Fault: a resume with fewer steps does nothing, says nothing, and rewrites the settings."""
    before = contents(two_steps)
    with pytest.raises(BadInput, match="at step 2: .*--steps"):
        run(data, two_steps, "--steps", 1, "--resume")
    assert contents(two_steps) == before


def test_the_bar_of_a_resumed_run_counts_all_steps(copied, data, capsys):
    run(data, copied, "--steps", 4, "--resume")
    assert "4/4" in capsys.readouterr().err
    run(data, copied, "--steps", 0, "--resume")
    assert "it/s" not in capsys.readouterr().err  # nothing to count


def test_an_evaluation_says_that_verdicts_timed_out(copied, data, monkeypatch):
    """Fault: answers that ran out of time count as wrong, and nobody is told."""
    monkeypatch.setitem(common.library, "timeouts", 1)
    with pytest.warns(UserWarning, match="verification timed out"):
        run(data, copied, "--steps", 0, "--resume")


def test_34_a_damaged_config_is_named(copied, data):
    """Fault: a run whose config.json is damaged is said not to be there."""
    (copied / "config.json").write_text('{"steps": 2')
    with pytest.raises(BadInput, match="cannot read .*config.json"):
        run(data, copied, "--steps", 3, "--resume")


def test_36_a_half_zeroed_state_is_skipped(copied, capsys):
    """Fault: a file of the right size, whose first half was lost, ends the resume."""
    path = copied / "checkpoint-2/optimizer.pt"
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(bytes(half) + content[half:])
    assert common.find_checkpoint(copied) == (copied / "checkpoint-1", 1)
    assert "checkpoint-2 is incomplete: skipped" in capsys.readouterr().out


# --- moved, linked, read-only ---


def test_52_scripts_without_write_permission(data, tmp_path, monkeypatch):
    """Fault: the copy in the run's folder inherits read-only, so the resume cannot replace it."""
    monkeypatch.setattr(grpo, "__file__", str(tmp_path / "grpo.py"))
    for steps in 1, 2:
        Path(grpo.__file__).write_text(f"# version {steps}\n")
        Path(grpo.__file__).chmod(0o444)
        run(data, tmp_path / "run", "--steps", steps, *(["--resume"] if steps == 2 else []))
        copy = tmp_path / "run/grpo.py"
        assert copy.read_text() == f"# version {steps}\n"
        assert copy.stat().st_mode & 0o200  # root may write in any case, so look at the mode
        Path(grpo.__file__).unlink()


def checkout(folder, monkeypatch):
    """The modules grpo and common of the copy of this repository in a folder."""
    monkeypatch.syspath_prepend(folder)
    for name in "common", "grpo":
        monkeypatch.delitem(sys.modules, name)
    script = importlib.import_module("grpo")
    assert Path(script.__file__).parent == folder
    return script, importlib.import_module("common")


@pytest.mark.parametrize("adapters", [[], ["--lora_rank", "2"]], ids=["weights", "adapters"])
def test_57_the_checkout_moved(tmp_path, adapters):
    """Fault: a resume after a move is "another run", over paths that nobody typed."""
    old = tmp_path / "old"
    (old / "tests").mkdir(parents=True)
    for name in "grpo.py", "common.py":
        shutil.copy(ROOT / name, old)
    shutil.copytree(TINY, old / "tests/tiny")
    flags = [*conftest.SMALL, *FLAGS, "--eval_problems", "1", *adapters]
    for steps, folder, more in (1, old, []), (2, tmp_path / "new", ["--resume"]):
        if more:
            old.rename(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            script, common_there = checkout(folder, patch)
            given = [*flags, "--steps", str(steps), *more]
            script.main(common_there.parse_args(script.Args, script.TINY, given))
    assert [line["step"] for line in training_lines(folder / "runs/grpo")] == [1, 2]
    here = parse(*flags, "--steps", 2, "--output_dir", tmp_path / "whole")
    grpo.main(here)
    assert metrics(tmp_path / "whole")[-2:] == metrics(folder / "runs/grpo")[-2:]


def test_57_one_folder_written_in_two_ways(data, tmp_path, monkeypatch):
    """Fault: --model ./m and --model ./m/ are two models."""
    shutil.copytree(TINY, tmp_path / "m")
    shutil.copytree(data, tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    flags = ["--eval_problems", 1, "--device", "cpu", "--instruction", ""]
    run("./d", "run", *flags, "--steps", 1, "--model", "./m")
    run("d/", "run", *flags, "--steps", 2, "--model", "./m/", "--resume")
    run("d/../d", "run", *flags, "--steps", 3, "--model", "m", "--resume")
    assert [line["step"] for line in training_lines("run")] == [1, 2, 3]


# --- evaluations of a finished run ---


def test_resume_with_steps_0_evaluates_the_newest_checkpoint(two_steps, copied, data):
    """Fault: --resume --steps 0 evaluates the base model, or trains."""
    run(data, copied, "--steps", 0, "--resume")
    before = metrics(two_steps)
    assert metrics(copied) == [*before, before[-1]]
    after = contents(copied)
    for path, text in contents(two_steps).items():
        if path.name != "metrics.jsonl":
            assert after[copied / path.relative_to(two_steps)] == text


OTHERS = {
    "eval_dataset-other": ["--eval_dataset", "other.jsonl"],
    "eval_dataset-a_other": ["--eval_dataset", "./a/other.jsonl"],
    "eval_dataset-a": ["--eval_dataset", "a/"],
    "eval_temperature-0.0": ["--eval_temperature", 0],
    "temperature-0.5": ["--temperature", 0.5],
    "eval_problems-4": ["--eval_problems", 4],
    "eval_samples-4": ["--eval_samples", 4],
    "eval_dataset-other-eval_samples-4": ["--eval_dataset", "other.jsonl", "--eval_samples", 4],
}


def test_59_a_long_path_makes_a_name_that_fits(copied, data, tmp_path):
    """Fault: a whole evaluation is lost, since its file's name is too long."""
    folder = tmp_path.joinpath("b" * 120, "b" * 120)
    folder.mkdir(parents=True)
    shutil.copy(Path(data, "test.jsonl"), folder / "other.jsonl")
    other = ["--eval_dataset", folder / "other.jsonl", "--eval_problems", 1]
    run(data, copied, "--steps", 0, "--resume", *other)
    assert metrics(copied)[-1]["eval_dataset"].endswith("b_other-eval_problems-1")


def test_59_another_evaluation_has_another_name(two_steps, copied, data, tmp_path, monkeypatch):
    """Fault: a second evaluation replaces the run's own, and their curves are averaged."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for number, name in enumerate(["other.jsonl", "a/other.jsonl", "a/test.jsonl"], 3):
        lines = (TINY / "test.jsonl").read_text().splitlines()[10 * number :][:3]
        Path(name).write_text("\n".join(lines))
    before = metrics(copied)
    for name, flags in OTHERS.items():
        run(data, copied, "--steps", 0, "--resume", *flags)
        line = metrics(copied)[-1]
        assert (line["step"], line["eval_dataset"]) == (2, name)
        rewards = [row["rewards"] for row in read_jsonl(copied / f"eval-2-{name}.jsonl")]
        assert line["eval_reward"] == pytest.approx(sum(map(sum, rewards)) / sum(map(len, rewards)))
    after = contents(copied)
    assert metrics(copied)[: len(before)] == before
    assert len(metrics(copied)) == len(before) + len(OTHERS)
    assert len(after) == len(contents(two_steps)) + len(OTHERS)
    for path, text in contents(two_steps).items():
        if path.name != "metrics.jsonl":
            assert after[copied / path.relative_to(two_steps)] == text
    # Training continues with another evaluation, and then with its own again.
    run(data, copied, "--steps", 3, "--resume", "--eval_samples", 4)
    assert metrics(copied)[-1]["eval_dataset"] == "eval_samples-4"
    names = sorted(path.name for path in copied.glob("eval-3*.jsonl"))
    assert names == ["eval-3-eval_samples-4.jsonl"]
    run(data, copied, "--steps", 4, "--resume")
    own = [line["step"] for line in evaluation_lines(copied) if "eval_dataset" not in line]
    assert own == [0, 2, 4] and (copied / "eval-4.jsonl").exists()
    assert len(metrics(copied)) == len(before) + len(OTHERS) + 4


def test_59_a_withdrawn_evaluation_set_has_a_name(data, tmp_path):
    """Fault: an evaluation on the run's own data is called eval_dataset-None."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join((TINY / "test.jsonl").open().readlines()[:3]))
    run(data, tmp_path / "run", "--steps", 1, "--eval_dataset", other)
    run(data, tmp_path / "run", "--steps", 0, "--resume")
    name = metrics(tmp_path / "run")[-1]["eval_dataset"]
    assert name.startswith("eval_dataset-") and Path(data).name in name


def test_59_an_evaluation_deletes_no_line(copied, data):
    """Fault: an evaluation drops the steps after its checkpoint, or all if there is none."""
    shutil.rmtree(copied / "checkpoint-2")
    before = metrics(copied)
    run(data, copied, "--steps", 0, "--resume", "--eval_problems", 1)
    assert metrics(copied)[:-1] == before and metrics(copied)[-1]["step"] == 1
    shutil.rmtree(copied / "checkpoint-1")
    run(data, copied, "--steps", 0, "--resume", "--eval_problems", 1)
    assert metrics(copied)[:-2] == before and metrics(copied)[-1]["step"] == 0
