"""Several processes on one machine (torchrun, gloo): what they compute, share, write and say."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, evaluation_lines, read_jsonl, run, training_lines

SMALL = "--prompts_per_step 6 --group_size 4 --max_new_tokens 24 --eval_problems 7".split()
COUNTED = "reward completion_len truncated_frac degenerate_frac degenerate_iid tokens".split()
ROUNDED = "entropy sampling_logp_diff loss grad_norm clip_frac kl".split()


def torchrun(count, script, *flags, **kwargs):
    """Start a script in `count` processes; returns the Popen of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += [str(ROOT / script), *SMALL, *map(str, flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def finish(process):
    out, errors = process.communicate(timeout=180)
    return process.returncode, out, errors


def together(count, script, *flags):
    code, out, errors = finish(torchrun(count, script, *flags))
    assert code == 0, errors[-3000:]
    return out


def said(errors):
    """The sentences of the scripts among what torchrun prints."""
    return re.findall("(?:error: |interrupted).*", errors)


CASES = {
    "grpo beta mu": (
        "grpo", ["--beta", 0.04, "--updates_per_rollout", 2, "--micro_batch_tokens", 150]),
    "ep_grpo": ("ep_grpo", ["--micro_batch_tokens", 150]),
    "adapters": ("dr_grpo", ["--lora_rank", 4, "--beta", 0.04]),
}


@pytest.fixture(scope="module")
def pairs(data, tmp_path_factory):
    """Runs of three steps by one process and by two: {case: (folder, folder)}."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for case, (name, flags) in CASES.items():
        one, two = folder / f"{case} one", folder / f"{case} two"
        flags = [*SMALL, "--steps", 3, "--save_every", 2, "--eval_every", 2, *flags]
        run(data, one, *flags, script=SCRIPTS[name])
        out = together(2, f"{name}.py", "--dataset", data, "--output_dir", two, *flags)
        assert out.count("step 0: eval_accuracy") == out.count("step 1, reward") == 1  # by rank 0
        assert [line["step"] for line in read_jsonl(two / "metrics.jsonl")] == [0, 1, 2, 2, 3, 3]
        found[case] = (one, two)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_one_does(pairs, case):
    """Fault: another loss scale, other samples, or means over one process' share."""
    one, two = pairs[case]
    for a, b in zip(training_lines(one)[:2], training_lines(two)[:2], strict=True):
        assert {key: a[key] for key in COUNTED} == pytest.approx({key: b[key] for key in COUNTED})
        for key in ROUNDED:
            if a[key] is None:
                assert b[key] is None
            else:
                assert b[key] == pytest.approx(a[key], rel=5e-3, abs=1e-6), key
    assert training_lines(one)[1]["grad_norm"] > 0
    assert evaluation_lines(one)[:2] == evaluation_lines(two)[:2]
    for name in "eval-0.jsonl", "eval-2.jsonl":  # the same responses to the same problems
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_two_processes_save_what_one_does(pairs, case):
    """Fault: half a state in the checkpoint, or one that only as many processes can load."""
    paths = [folder / "checkpoint-2/optimizer.pt" for folder in pairs[case]]
    states = [torch.load(path, weights_only=True) for path in paths]
    for a, b in zip(states[0]["masters"], states[1]["masters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for one, two in zip(*(state["adamw"]["state"].values() for state in states), strict=True):
        assert one["step"] == two["step"]
        assert one["exp_avg"].shape == two["exp_avg"].shape


@pytest.mark.parametrize("count", [1, 3])
def test_a_resume_with_another_number_of_processes_continues_the_run(pairs, data, tmp_path, count):
    """Fault: a run is bound to as many processes as it began with."""
    one, two = pairs["grpo beta mu"]
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    shutil.rmtree(folder / "checkpoint-3")
    flags = [*SMALL, "--steps", 3, "--save_every", 2, "--eval_every", 2, *CASES["grpo beta mu"][1]]
    if count == 1:
        run(data, folder, "--resume", *flags)
    else:
        together(count, "grpo.py", "--dataset", data, "--output_dir", folder, "--resume", *flags)
    assert len(training_lines(folder)) == 3
    a, b = training_lines(one)[2], training_lines(folder)[2]
    assert a["tokens"] == b["tokens"] and a["reward"] == b["reward"]
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=5e-3)


LOCAL = '''
import os, sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import common, grpo
common.start_process("cpu")
model, _ = common.load_model(grpo.TINY_DIR, "cpu")
optimizer = common.Float32AdamW(model, grpo.Args())
for weight in optimizer.weights[: 1 if dist.get_rank() else None]:  # one has fewer
    (weight.sum() * (1 + dist.get_rank())).backward()
norm = optimizer.step(1e-3, skip=dist.get_rank() == 1)  # one would skip, the other not
elements = sum(master.to_local().numel() for master in optimizer.masters)
moments = sum(s["exp_avg"].to_local().numel() for s in optimizer.adamw.state.values())
total = sum(weight.numel() for weight in optimizer.weights)
run = object.__new__(common.Run)
run.rank, run.processes = common.world()
sums = {"b": 3.0, "a": 3.0} if run.rank else {"a": 1.0}  # another order, and one is missing
assert run.token_means(sums, 1 + run.rank) == {"a": 4 / 3, "b": 1.0}
numbers = torch.arange(1 + 2 * run.rank)
assert run.means({"x": numbers, "y": 0.5 + run.rank}) == {"x": 3 / 4, "y": 1.0}
assert run.total(2) == 4
with open(f"{sys.argv[2]}/{dist.get_rank()}.txt", "w") as file:
    file.write(f"{elements} {moments} {total} {norm}")
dist.destroy_process_group()
'''


def test_each_process_holds_its_share_of_masters_and_moments(tmp_path):
    """Fault: every card holds the whole optimizer; or one that skips leaves the other waiting."""
    path = tmp_path / "local.py"
    path.write_text(LOCAL)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(path), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    (a, b) = ((tmp_path / f"{rank}.txt").read_text().split() for rank in (0, 1))
    total = int(a[2])
    assert int(a[0]) + int(b[0]) == int(a[1]) + int(b[1]) == total
    assert all(0.45 < int(x) / total < 0.55 for x in (a[0], b[0]))
    assert a[3] == b[3] and float(a[3]) > 0


def test_prompts_that_cannot_be_shared_are_refused_once(data, tmp_path):
    """Fault: a share of 5 prompts for 2 processes, or the sentence once per process."""
    code, _, errors = finish(torchrun(
        2, "grpo.py", "--dataset", data, "--output_dir", tmp_path / "run", "--prompts_per_step", 5))
    assert code != 0
    assert said(errors) == ["error: --prompts_per_step must be divisible by the 2 processes"]
    assert "exitcode  : 2" in errors and not (tmp_path / "run/metrics.jsonl").exists()


FAILING = '''
import sys
sys.path.insert(0, {root!r})
import common, grpo
real = grpo.compute_reward
def compute_reward(text, problem, length):
    rank = common.world()[0]
    return float("nan") if rank == 1 and length > 0 else real(text, problem, length)
grpo.compute_reward = compute_reward
common.run_script(grpo.main, grpo.Args, grpo.TINY)
'''


def test_an_error_in_one_process_ends_all_with_its_sentence(data, tmp_path):
    """Fault: one process fails and the others wait for ever, or its reason is not printed."""
    path = tmp_path / "grpo.py"
    path.write_text(FAILING.format(root=str(ROOT)))
    train = f"{data}/train.jsonl"  # no evaluation
    code, _, errors = finish(torchrun(
        2, path, "--dataset", train, "--output_dir", tmp_path / "run", "--steps", 2))
    assert code != 0 and "exitcode  : 2" in errors
    assert said(errors) == ["error: compute_reward returned nan, which is not a finite number"]


def wait_for(process, condition):
    end = time.time() + 120
    while not condition() and process.poll() is None and time.time() < end:
        time.sleep(0.1)
    assert condition()


def test_ctrl_c_ends_all_processes_with_one_sentence(data, tmp_path):
    """Fault: a traceback per process, or processes that live on."""
    folder = tmp_path / "run"
    process = torchrun(
        2, "grpo.py", "--dataset", data, "--output_dir", folder, "--steps", 999, "--save_every", 1,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    wait_for(process, lambda: (folder / "checkpoint-1").exists())
    process.send_signal(signal.SIGINT)
    _, _, errors = finish(process)
    assert said(errors) == ["interrupted: add --resume to continue from the last checkpoint"]


def test_a_killed_process_leaves_complete_checkpoints(data, tmp_path):
    """Fault: the others hang, or what is left cannot be resumed."""
    folder = tmp_path / "run"
    flags = ["--dataset", data, "--output_dir", folder, "--save_every", 1, "--eval_every", 100]
    process = torchrun(2, "grpo.py", *flags, "--steps", 999)
    wait_for(process, lambda: (folder / "checkpoint-2").exists())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, _, _ = finish(process)
    assert code != 0
    (folder / "checkpoint.tmp").mkdir(exist_ok=True)
    step = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    out = together(2, "grpo.py", *flags, "--steps", step + 1, "--resume")
    assert "continuing from" in out and "incomplete" not in out.replace("checkpoint.tmp", "")
    assert [line["step"] for line in training_lines(folder)] == list(range(1, step + 2))
