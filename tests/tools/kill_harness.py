"""Runs grpo.py in forks that are killed, or whose disk is full. Called by tests/test_resume.py:

    python tests/tools/kill_harness.py kills|full_disk "<flags of grpo.py>" FOLDER

Everything a fork needs is imported first, but no model is loaded in this process: a fork of a
process with threads hangs, and after a backward pass torch allows its forks none.
"""

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
import grpo  # noqa: E402

torch.set_num_threads(1)
transformers.Qwen2ForCausalLM, transformers.Qwen2Tokenizer  # imports what every fork needs
mode, flags, work = sys.argv[1], sys.argv[2].split(), Path(sys.argv[3])
saved = work / "saved.txt"  # outside the run: the steps whose save has returned, with their calls


def in_fork(function):
    """The exit status of function() in a fork."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    os.dup2(os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    try:
        os._exit(function())
    except BaseException:  # its traceback goes to output.txt
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def train(folder, before_save=None, moment=None):
    """A run in a fork; its exit status. It dies at its moment-th call of a Python function.

    before_save(step, trace) is called before each save. Calls are counted from the start, or from
    where before_save starts to trace.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(run, step, *rest, real=common.Run.save):
        before = count
        if before_save:
            before_save(step, trace)
        real(run, step, *rest)
        with open(saved, "a") as file:
            file.write(f"{step} {count - before}\n")

    def child():
        common.Run.save = save
        # No process of the verifier's: it would take a second in every fork.
        grpo.verify = lambda text, answer: float(text.endswith(f"\\boxed{{{answer}}}"))
        more = ["--resume"] if (folder / "config.json").exists() else []
        args = common.parse_args(grpo.Args, grpo.TINY, [*flags, "--output_dir", str(folder), *more])
        if moment and not before_save:
            sys.settrace(trace)
        try:
            grpo.main(args)
        except common.BadInput as error:
            sys.settrace(None)
            (work / "error.txt").write_text(str(error))
            return 2
        sys.settrace(None)
        (work / "count.txt").write_text(str(count))
        return 0

    return in_fork(child)


def newest_complete(folder):
    """The step of the newest checkpoint that loads."""

    def child():
        checkpoint, step = common.find_checkpoint(folder)
        if checkpoint is not None:
            common.load_model(checkpoint, "cpu")
        return step

    return os.waitstatus_to_exitcode(in_fork(child))


def output():
    return (work / "output.txt").read_text()


def kills(wanted=20):
    """Kill runs at random moments, half of them inside a save, and resume them until they end."""
    rng = random.Random(0)
    # How many Python calls there are in a whole run, and in one save.
    assert train(work / "counted", moment=10**12) == 0, output()
    total = int((work / "count.txt").read_text())
    in_save = int(saved.read_text().split()[1])
    saved.write_text("")
    runs = killed = killed_in_save = 0
    folder = work / "run-0"
    while killed < wanted or folder.exists():
        inside = killed % 2 == 0
        if killed >= wanted:
            status = train(folder)
        elif inside:
            left = rng.randrange(3)  # which save

            def before_save(step, trace):
                nonlocal left
                left -= 1
                if left < 0:
                    sys.settrace(trace)

            status = train(folder, before_save, rng.randrange(1, in_save))
        else:
            status = train(folder, moment=rng.randrange(total))
        if status == signal.SIGKILL:
            killed += 1
            killed_in_save += inside
            done = [int(line.split()[0]) for line in saved.read_text().splitlines()]
            assert not done or newest_complete(folder) >= done[-1], done
        else:
            assert status == 0, output()
            saved.write_text("")
            runs += 1
            folder = work / f"run-{runs}"
    print(json.dumps([runs, killed, killed_in_save]))


def full_disk():
    """Files may not grow past a limit within the weights, then within the optimizer's state."""
    for name, limit in ("weights", 600_000), ("state", 2_000_000):

        def before_save(step, trace, limit=limit):
            if step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        assert train(work / name, before_save) == 2 << 8, output()
        (work / "error.txt").rename(work / f"{name}.txt")


if __name__ == "__main__":
    {"kills": kills, "full_disk": full_disk}[mode]()
