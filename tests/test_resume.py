"""A resumed run is the same run: checkpoints, kills, broken checkpoints, changed flags, full disks (FAULTS 34-38)."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import common
import ep_grpo
import grpo

ROOT = Path(grpo.__file__).parent
SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_every 3 --eval_problems 8 --save_every 3"
SMALL = SMALL.split()


def run(script, data, folder, *flags):
    script.main(script.parse_args([*SMALL, "--dataset", data, "--output_dir", str(folder), *map(str, flags)]))


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]


def flat(value):
    if isinstance(value, dict):
        return [x for key in sorted(value, key=str) for x in flat(value[key])]
    return [x for item in value for x in flat(item)] if isinstance(value, (list, tuple)) else [value]


def assert_same_run(a, b, step):
    assert metrics(a) == metrics(b)
    weights, others = ((folder / f"checkpoint-{step}/model.safetensors").read_bytes() for folder in (a, b))
    assert weights == others
    states = [torch.load(folder / f"checkpoint-{step}/optimizer.pt", weights_only=True) for folder in (a, b)]
    for x, y in zip(*map(flat, states), strict=True):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y
    evals = [{path.name: path.read_bytes() for path in folder.glob("eval-*.jsonl")} for folder in (a, b)]
    assert evals[0] == evals[1] and len(evals[0]) > 1


ALGORITHMS = {"grpo": (grpo, ["--beta", "0.04"]), "ep_grpo": (ep_grpo, ["--progress_weight", "1"])}


@pytest.fixture(scope="module", params=ALGORITHMS)
def straight(request, data, tmp_path_factory):
    """A run of six steps without a break."""
    script, flags = ALGORITHMS[request.param]
    folder = tmp_path_factory.mktemp("straight")
    run(script, data, folder, *flags, "--steps", 6)
    return script, flags, folder


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    """A run of two steps that saved both."""
    folder = tmp_path_factory.mktemp("two")
    run(grpo, data, folder, "--steps", 2, "--save_every", 1)
    return folder


# --- the same run ---


def test_34_35_three_steps_and_a_resume_are_six_steps(straight, data, tmp_path, capsys):
    """Fault: the resumed run draws other samples, meets other problems, lost Adam's moments, or takes the checkpoint
    for the reference model, which both algorithms here measure their distance to."""
    script, flags, whole = straight
    run(script, data, tmp_path, *flags, "--steps", 3)
    capsys.readouterr()
    run(script, data, tmp_path, *flags, "--steps", 6, "--resume")
    out = capsys.readouterr().out
    assert "another --steps: 3 -> 6" in out and "checkpoint-3" in out
    assert_same_run(whole, tmp_path, 6)
    if script is grpo:
        assert metrics(whole)[1]["kl"] == 0 and metrics(whole)[-2]["kl"] > 0  # at first, and then no more


def test_35_the_reference_is_the_model_the_run_began_with(data, tmp_path, monkeypatch):
    """Fault: after a resume the checkpoint becomes the reference, and the penalty starts from 0 again."""
    run(grpo, data, tmp_path, "--steps", 1, "--beta", 0.1)
    loaded = []

    def load_model(name, device, trainable=True, real=grpo.load_model):
        loaded.append((Path(name).name, trainable))
        return real(name, device, trainable)

    monkeypatch.setattr(grpo, "load_model", load_model)
    run(grpo, data, tmp_path, "--steps", 2, "--beta", 0.1, "--resume")
    assert loaded == [("checkpoint-1", True), ("tiny", False)]
    assert metrics(tmp_path)[-2]["kl"] > 0


@pytest.mark.parametrize("past", ['{"step": 3, "reward": 0.25}\n{"step": 4, "rew', '{"step": 3, "rew'])
def test_34_metrics_past_the_checkpoint_and_half_a_line_are_dropped(two_steps, data, tmp_path, past):
    """Fault: the steps that are taken again stand in the log twice, or half a line breaks it."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    log = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(log + past)
    run(grpo, data, folder, "--steps", 2, "--save_every", 1, "--resume")
    assert_same_run(two_steps, folder, 2)
    shutil.rmtree(folder / "checkpoint-2")
    run(grpo, data, folder, "--steps", 2, "--save_every", 1, "--resume")
    assert_same_run(two_steps, folder, 2)


# --- killed ---

# Runs in a process of its own that imports and forks but never loads a model: forks of a process with threads hang, and
# after a backward pass torch allows its forks none.
HARNESS = '''
import json, os, random, shutil, signal, sys
from pathlib import Path
import torch, transformers
torch.set_num_threads(1)
import common, grpo

flags, work = sys.argv[1].split(), Path(sys.argv[2])
rng = random.Random(0)
transformers.Qwen2ForCausalLM, transformers.Qwen2Tokenizer  # imports what every child needs
common.library_equal = lambda gold, text: False  # nor need each start the verifier's process
saved = work / "saved.txt"  # outside the run: the steps whose save has returned


def child(folder, save_hook=None, moment=None):
    """Run main in a fork, dead after `moment` Python calls; save_hook(step) is called before each save."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    count = 0

    def trace(frame, event, argument):  # every call of a Python function
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(run, step, *rest, real=grpo.save_checkpoint):
        before = count
        if save_hook:
            save_hook(step, trace)
        real(run, step, *rest)
        with open(saved, "a") as file:
            file.write(f"{step} {count - before}\\n")

    grpo.save_checkpoint = save
    os.dup2(os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    more = ["--resume"] if (folder / "config.json").exists() else []
    if moment and not save_hook:
        sys.settrace(trace)
    try:
        grpo.main(grpo.parse_args([*flags, "--output_dir", str(folder), *more]))
    except common.BadInput as error:
        sys.settrace(None)
        (work / "error.txt").write_text(str(error))
        os._exit(2)
    sys.settrace(None)
    (work / "count.txt").write_text(str(count))
    os._exit(0)
'''

KILLS = '''
def newest_whole(folder):
    """The step of the newest checkpoint that loads, found out in a fork too: this process must not start threads."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    checkpoint, step, state = common.load_checkpoint(folder)
    try:
        common.load_model(str(checkpoint), "cpu")
    except common.BadInput:
        step = 0
    os._exit(step)


# How many Python calls there are in the whole run, and in one save.
assert child(work / "counted", moment=10**12) == 0
total, in_save = int((work / "count.txt").read_text()), int(saved.read_text().split()[1])
saved.write_text("")
runs, kills, kills_in_save, folder = 0, 0, 0, work / "run-0"
while kills < 20 or folder.exists():
    if kills >= 20:
        status = child(folder)
    elif kills % 2:  # somewhere in the run
        status = child(folder, moment=rng.randrange(total))
    else:  # inside the save after next
        left = rng.randrange(3)
        moment = rng.randrange(1, in_save)

        def hook(step, trace):
            global left
            left -= 1
            if left < 0:
                sys.settrace(trace)

        status = child(folder, save_hook=hook, moment=moment)
        kills_in_save += status == signal.SIGKILL
    if status == signal.SIGKILL:
        kills += 1
        done = [int(line.split()[0]) for line in saved.read_text().splitlines()]
        assert not done or newest_whole(folder) >= done[-1], done
    else:
        assert status == 0, (work / "output.txt").read_text()
        saved.write_text("")
        runs += 1
        folder = work / f"run-{runs}"
print(json.dumps([runs, kills, kills_in_save]), file=sys.stderr)
'''

FULL_DISK = '''
import resource

for name, limit in ("weights", 600_000), ("state", 2_000_000):  # within model.safetensors, within optimizer.pt

    def hook(step, trace):
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    assert child(work / name, save_hook=hook) == 2 << 8, (work / "output.txt").read_text()
    (work / "error.txt").rename(work / f"{name}.txt")
'''


def harness(code, work, data):
    flags = " ".join([*SMALL, "--dataset", data, "--save_every", "1", "--eval_every", "2", "--steps", "4"])
    command = [sys.executable, "-c", HARNESS + code, flags, str(work)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=one_thread)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def test_36_killed_at_twenty_moments_nothing_saved_is_lost(data, tmp_path):
    """Fault: a kill, above all one inside a save, loses a checkpoint that had been saved or changes the run."""
    runs, kills, kills_in_save = json.loads(harness(KILLS, tmp_path, data).splitlines()[-1])
    assert kills == 20 and kills_in_save >= 8 and runs >= 2
    for number in range(runs):
        assert_same_run(tmp_path / "counted", tmp_path / f"run-{number}", 4)


def test_36_a_full_disk_while_saving_ends_with_a_sentence(data, tmp_path):
    """Fault: a traceback, or a broken checkpoint in the place of a whole one."""
    harness(FULL_DISK, tmp_path, data)
    for name in "weights", "state":
        error = (tmp_path / f"{name}.txt").read_text()
        assert "cannot save" in error and "checkpoint-2" in error and "--resume" in error and "\n" not in error
        assert [path.name for path in common.checkpoints(tmp_path / name)] == ["checkpoint-1"]
        assert common.load_checkpoint(tmp_path / name)[1] == 1
        assert not (tmp_path / name / "checkpoint.tmp").exists()  # it would take up what room is left


def test_ctrl_c_says_how_to_go_on(data, tmp_path):
    """Fault: Ctrl-C ends in a traceback."""
    flags = [*SMALL, "--dataset", data, "--output_dir", "a run", "--steps", "9999"]
    command = [sys.executable, str(ROOT / "grpo.py"), *flags]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells make background jobs ignore Ctrl-C
    )  # fmt: skip
    log = tmp_path / "a run/metrics.jsonl"
    while process.poll() is None and not (log.exists() and "reward" in log.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 130 and "Traceback" not in errors
    assert "interrupted" in last and "--resume" in last


# --- broken checkpoints ---


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def scramble(path):
    path.write_bytes(bytes(path.stat().st_size))  # zeros, as after a power cut


DAMAGES = {
    "half the weights": lambda folder: truncate(folder / "model.safetensors"),
    "half the optimizer": lambda folder: truncate(folder / "optimizer.pt"),
    "zeros for the optimizer": lambda folder: scramble(folder / "optimizer.pt"),
    "half the sizes": lambda folder: truncate(folder / "whole.json"),
    "no sizes": lambda folder: (folder / "whole.json").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_36_a_broken_newest_checkpoint_is_passed_over_and_said(two_steps, data, tmp_path, capsys, damage):
    """Fault: a half-written checkpoint is loaded, crashes the resume, or is skipped in silence."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    DAMAGES[damage](folder / "checkpoint-2")
    run(grpo, data, folder, "--steps", 2, "--save_every", 1, "--resume")
    out = capsys.readouterr().out
    assert "checkpoint-2 is not whole: passed over" in out
    assert f"going on from {folder}/checkpoint-1" in out
    assert_same_run(two_steps, folder, 2)


def test_36_without_a_whole_checkpoint_it_says_so_and_starts_again(two_steps, data, tmp_path, capsys):
    """Fault: nothing to go on from, and it crashes, or starts again without a word."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    for number in 1, 2:
        truncate(folder / f"checkpoint-{number}/model.safetensors")
    run(grpo, data, folder, "--steps", 2, "--save_every", 1, "--resume")
    assert "no whole checkpoint: starting from step 0" in capsys.readouterr().out
    assert_same_run(two_steps, folder, 2)


def test_36_only_the_last_two_checkpoints_are_kept(data, tmp_path):
    """Fault: the disk fills up with checkpoints, or the one to fall back to is gone."""
    run(grpo, data, tmp_path, "--steps", 3, "--save_every", 1)
    assert [path.name for path in common.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint")} == {
        "checkpoint-2", "checkpoint-3",
    }  # fmt: skip


def test_36_checkpoints_are_ordered_by_number(tmp_path):
    """Fault: checkpoint-100 sorts before checkpoint-20."""
    for step in 100, 20, 3:
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint.tmp").mkdir()
    assert [path.name for path in common.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


# --- changed flags ---


def test_34_changed_flags_are_named_and_obeyed(two_steps, data, tmp_path, capsys):
    """Fault: another flag at a resume passes in silence, or is named and then overwritten by the checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    run(grpo, data, folder, "--steps", 3, "--resume", "--learning_rate", 1e-5, "--weight_decay", 0.5)
    out = capsys.readouterr().out
    assert "another --learning_rate: 0.0003 -> 1e-05" in out and "another --weight_decay: 0.0 -> 0.5" in out
    assert "output_dir" not in out.replace("--output_dir NEW", "")
    (group,) = torch.load(folder / "checkpoint-3/optimizer.pt", weights_only=True)["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-5, 0.5)


CHANGES = {
    "model": ["--model", "elsewhere"], "dataset": ["--dataset", "elsewhere"], "seed": ["--seed", "7"],
    "group_size": ["--group_size", "2"], "prompts_per_step": ["--prompts_per_step", "2"],
    "instruction": ["--instruction", "Be brief."], "max_prompt_tokens": ["--max_prompt_tokens", "7"],
}  # fmt: skip


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", CHANGES)
def test_34_flags_that_make_another_run_are_refused(two_steps, data, change):
    """Fault: a resume with another model, dataset, seed or group size goes on as if it were the same run."""
    before = contents(two_steps)
    with pytest.raises(common.BadInput, match=rf"another one.*{change}"):
        run(grpo, data, two_steps, "--steps", 2, "--save_every", 1, "--resume", *CHANGES[change])
    assert contents(two_steps) == before


def test_34_another_script_is_refused(two_steps, data):
    """Fault: another algorithm goes on with this one's run."""
    before = contents(two_steps)
    with pytest.raises(common.BadInput, match="script.*grpo -> ep_grpo"):
        run(ep_grpo, data, two_steps, "--steps", 2, "--save_every", 1, "--resume")
    assert contents(two_steps) == before


def test_34_resume_without_a_run_is_refused(data, tmp_path):
    """Fault: --resume with nothing there starts from scratch, perhaps after a slip in --output_dir."""
    with pytest.raises(common.BadInput, match="--resume: there is no run in"):
        run(grpo, data, tmp_path / "nothing", "--resume")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("text", ['{"script": ', "[]", "5", '["ab", "cd", 3]'])
def test_34_a_damaged_config_is_one_sentence(two_steps, data, tmp_path, text):
    """Fault: a traceback out of json."""
    shutil.copytree(two_steps, tmp_path / "run")
    (tmp_path / "run/config.json").write_text(text)
    with pytest.raises(common.BadInput, match="--resume"):
        run(grpo, data, tmp_path / "run", "--steps", 3, "--resume")


def test_36_a_folder_in_a_checkpoint_has_no_size_to_compare(two_steps, tmp_path):
    """Fault: a tokenizer saves a folder, whose size is the file system's: a copy elsewhere counts as broken."""
    model, tokenizer = common.load_model(grpo.TINY_DIR, "cpu")
    tokenizer.chat_template = {"default": "{{ messages }}", "other": "{{ messages }}"}  # in a folder of its own
    masters = common.float32_masters(model)
    common.save_checkpoint(tmp_path, 1, model, tokenizer, masters, torch.optim.AdamW(masters))
    folders = {path.name for path in (tmp_path / "checkpoint-1").iterdir() if path.is_dir()}
    sizes = json.loads((tmp_path / "checkpoint-1/whole.json").read_text())["sizes"]
    assert folders and not folders & sizes.keys() and "model.safetensors" in sizes


def test_34_config_is_replaced_whole():
    """Fault: a kill while config.json is written anew leaves a run that cannot be resumed."""
    tree = ast.parse((ROOT / "common.py").read_text())
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "open_run")
    code = ast.unparse(function)
    assert "config.json').write_text" not in code and "replace(folder / 'config.json')" in code


def test_36_a_folder_with_checkpoints_is_another_run_even_without_metrics(two_steps, data, tmp_path):
    """Fault: metrics.jsonl was deleted; a new run there loses its checkpoints to the old run's higher numbers."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(common.BadInput, match="holds a run"):
        run(grpo, data, folder, "--steps", 1)


def test_36_checkpoints_saved_under_a_broken_higher_one_are_kept(two_steps, data, tmp_path):
    """Fault: only the highest numbers are kept, so beside broken ones every new checkpoint is deleted at once."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    for name in ("checkpoint-1", "checkpoint-2"):
        if (folder / name).exists():
            shutil.move(folder / name, folder / f"checkpoint-{int(name[-1]) + 7}")
    for optimizer in folder.glob("checkpoint-*/optimizer.pt"):
        optimizer.write_bytes(b"")
    run(grpo, data, folder, "--steps", 1, "--resume")
    assert (folder / "checkpoint-1").is_dir()


def test_36_weights_of_zeros_are_passed_over(two_steps, tmp_path):
    """Fault: after a power cut a file of the right size holds zeros, and the resume ends in the loader."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    weights = folder / "checkpoint-2/model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert common.load_checkpoint(folder)[1] < 2


def test_36_a_copy_under_another_name_is_left_alone(two_steps, data, tmp_path):
    """Fault: checkpoint-best, the user's own copy, crashes the resume or is deleted."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-best")
    run(grpo, data, folder, "--steps", 5, "--resume", "--save_every", 1)
    assert (folder / "checkpoint-best").is_dir()
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5", "checkpoint-best"}


def test_34_an_edited_script_is_named(two_steps, data, tmp_path, capsys):
    """Fault: the algorithm was edited between start and resume, and the log does not say so."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    (folder / "grpo.py").write_text("# an older version\n")
    run(grpo, data, folder, "--steps", 3, "--resume")
    assert "edited grpo.py" in capsys.readouterr().out


def test_34_fewer_steps_than_were_taken_is_one_sentence(two_steps, data, tmp_path):
    """Fault: a resume with fewer steps than the run has does nothing, says nothing, and rewrites the run's settings."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    before = (folder / "config.json").read_text()
    with pytest.raises(common.BadInput, match="at step 2 already"):
        run(grpo, data, folder, "--steps", 1, "--resume")
    assert (folder / "config.json").read_text() == before
