"""Seconds per step of two one-thread processes beside one, on the tiny recipe.

    python tests/tools/bench_processes.py [--steps 24 --rounds 3]

One and two gloo processes by torchrun, in alternating rounds. Rollout and update are medians over
the steps after the second; a step is the mean wall-clock time of them, logging included. Both ways
draw the same responses. Two cores may be less than twice one (shared caches, two threads of one
core), so two independent runs side by side are measured too: what they do together in a second,
beside what one does alone, is the most that two processes could reach. It needs two idle cores:
beside other work the ratio says nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tests" / "tiny" / "train.jsonl"  # a file alone has no held-out problems


class Timed:
    """A run whose log is watched as it is written."""

    def __init__(self, script, processes, steps):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "metrics.jsonl")
        self.times = []  # (seconds, lines of the log)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(processes)]
        command += [str(ROOT / f"{script}.py"), "--output_dir", self.folder.name, "--dataset"]
        command += [str(TRAIN), "--steps", str(steps), "--save_every", "10000"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.said = Path(self.folder.name, "said.txt")
        with open(self.said, "w") as said:  # not a pipe, which would fill up and stop the run
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)

    def read(self):
        """Note when new lines were found; False once the run has ended."""
        lines = self.path.read_text().count("\n") if self.path.exists() else 0
        if not self.times or lines > self.times[-1][1]:
            self.times.append((time.perf_counter(), lines))
        return self.process.poll() is None

    def result(self):
        """(seconds of rollout, of the update, of the whole step), and the tokens of all steps."""
        if self.process.wait():
            sys.exit(self.said.read_text()[-6000:])
        lines = [json.loads(line) for line in self.path.read_text().splitlines()][2:]
        parts = [[line[f"seconds_{name}"] for line in lines] for name in ("rollout", "update")]
        seen = [(moment, done) for moment, done in self.times if done >= 2]
        (start, first), (end, last) = seen[0], seen[-1]
        seconds = [statistics.median(part) for part in parts] + [(end - start) / (last - first)]
        return seconds, [line["tokens"] for line in lines]


def measure(script, steps, *processes):
    """The results of runs that are started together, each with so many processes."""
    runs = [Timed(script, count, steps) for count in processes]
    while any([run.read() for run in runs]):
        time.sleep(0.05)  # a closer look would take a core from them
    return [run.result() for run in runs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", default="grpo")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        one = measure(args.script, args.steps, 1)
        two = measure(args.script, args.steps, 2)
        beside = measure(args.script, args.steps, 1, 1)
        assert one[0][1] == two[0][1], "one and two processes drew different responses"
        slower = [statistics.mean(pair) for pair in zip(beside[0][0], beside[1][0])]
        rounds.append((one[0][0], two[0][0], slower))
    print("| | one process, s | two processes, s | speed-up | at most |\n|---|---|---|---|---|")
    for i, name in enumerate(["rollout", "update", "step"]):
        one = statistics.median(a[i] for a, _, _ in rounds)
        two = statistics.median(b[i] for _, b, _ in rounds)
        ratio = statistics.median(a[i] / b[i] for a, b, _ in rounds)
        most = statistics.median(2 * a[i] / c[i] for a, _, c in rounds)
        print(f"| {name} | {one:.2f} | {two:.2f} | {ratio:.2f} | {most:.2f} |")


if __name__ == "__main__":
    main()
