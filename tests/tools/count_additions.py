"""What the tiny model's responses are made of, from a run's evaluations: strategy and skill.

    python tests/tools/count_additions.py runs/grpo ...
    python tests/tools/count_additions.py docs/runs/stall.jsonl

The strategy is whether a response adds step by step (`2+6=8;8+9=17;...`) or guesses; the skill is
how many of the additions it writes are right. Both are shares over the responses of an evaluation.
A packed file holds them if it was made by `pack_runs.py --additions`.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analysis import read_json, read_packed
from common import BadInput


def describe(lines):
    """(accuracy, share step by step, share of right additions) of the lines of an evaluation."""
    right = stepwise = responses = additions = correct = 0
    for line in lines:
        terms = line["question"].count("+") + 1
        for response, reward in zip(line["samples"], line["rewards"]):
            responses += 1
            right += reward >= 1
            stepwise += response.count(";") >= terms - 1
            for a, b, total in re.findall(r"(?<![\d+])(\d+)\+(\d+)=(\d+)", response):
                additions += 1
                correct += int(a) + int(b) == int(total)
    return right / responses, stepwise / responses, correct / max(1, additions)


def evaluations(path):
    """[(run, step, what describe has found)] of a run's folder, or of a packed file."""
    if path.suffix == ".jsonl":
        pairs = [(log.name, line) for log in read_packed(path) for line in log.evals]
        if not all("additions" in line for _, line in pairs):
            raise BadInput(f"{path} was packed without --additions")
        return [(name, line["step"], line["additions"]) for name, line in pairs]
    files = {}
    for file in path.glob("eval-*.jsonl"):
        step = file.stem.removeprefix("eval-")
        if step.isdecimal():  # not an evaluation under other settings
            files[int(step)] = file
    return [(path.name, step, describe(read_json(file))) for step, file in sorted(files.items())]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders or packed files")
    print("| run | step | accuracy | step by step | additions right |\n|---|---|---|---|---|")
    for path in parser.parse_args(argv).runs:
        for run, step, shares in evaluations(path):
            numbers = " | ".join(f"{share:.2f}" for share in shares)
            print(f"| {run} | {step} | {numbers} |")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
