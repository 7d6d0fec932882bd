"""What the tiny model's responses are made of, from a run's evaluations: strategy and skill.

    python tests/tools/count_additions.py runs/grpo ...

The strategy is whether a response adds step by step (`2+6=8;8+9=17;...`) or guesses; the skill is
how many of the additions it writes are right. Both are shares over the responses of an evaluation.
"""

import argparse
import json
import re
from pathlib import Path


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    print("| run | step | accuracy | step by step | additions right |\n|---|---|---|---|---|")
    for run in parser.parse_args(argv).runs:
        files = sorted(run.glob("eval-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
        for file in dict.fromkeys([files[0], files[len(files) // 2], files[-1]]):
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            numbers = " | ".join(f"{share:.2f}" for share in describe(lines))
            print(f"| {run.name} | {file.stem.split('-')[1]} | {numbers} |")


if __name__ == "__main__":
    main()
