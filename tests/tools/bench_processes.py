"""Seconds per step of two one-thread processes beside one, on the tiny recipe.

    python tests/tools/bench_processes.py [--steps 6 --rounds 3]

One and two gloo processes by torchrun, in alternating rounds: wall-clock seconds, since that is
what a second process buys; the median of the steps after the first. It needs two idle cores: beside
other work the ratio says nothing. Both ways draw the same responses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tests" / "tiny" / "train.jsonl"  # a file alone has no held-out problems


def measure(script, processes, steps):
    """(seconds of rollout, of the update, of both) per step, and the tokens of all steps."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(processes), str(ROOT / f"{script}.py"), "--output_dir", out,
            "--dataset", str(TRAIN), "--steps", str(steps), "--save_every", "10000"]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        lines = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    rollout = [line["seconds_rollout"] for line in lines[1:]]
    update = [line["seconds_update"] for line in lines[1:]]
    both = [a + b for a, b in zip(rollout, update)]
    tokens = [line["tokens"] for line in lines]
    return [statistics.median(times) for times in (rollout, update, both)], tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", default="grpo")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = {1: [], 2: []}
    tokens = {}
    for _ in range(args.rounds):
        for processes in found:
            seconds, tokens[processes] = measure(args.script, processes, args.steps)
            found[processes].append(seconds)
    print("| | one process, s | two processes, s | speed-up |\n|---|---|---|---|")
    for i, name in enumerate(["rollout", "update", "step"]):
        one, two = [statistics.median(seconds[i] for seconds in found[n]) for n in found]
        ratio = statistics.median(a[i] / b[i] for a, b in zip(found[1], found[2]))
        print(f"| {name} | {one:.2f} | {two:.2f} | {ratio:.2f} |")
    print(f"\ntokens per step: {tokens[1]} and {tokens[2]}")


if __name__ == "__main__":
    main()
