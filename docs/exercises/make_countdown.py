"""Writes problems of the game Countdown: reach a target from some numbers, each used once.

    python docs/exercises/make_countdown.py countdown       countdown/train.jsonl and test.jsonl

A row has the columns nums, target and question. Every problem has a solution, and no problem of
train.jsonl stands in test.jsonl.
"""

import argparse
import json
import random
from fractions import Fraction
from pathlib import Path


def reach(nums, draws):
    """What some expression gives that uses each number once: a random one."""
    values = [Fraction(n) for n in nums]
    while len(values) > 1:
        draws.shuffle(values)
        a = values.pop()
        b = values.pop()
        results = [a + b, a - b, a * b]
        if b != 0:
            results.append(a / b)
        values.append(draws.choice(results))
    return values[0]


def make_row(draws):
    """Three or four numbers from 1 to 20 and a whole target from 10 to 100."""
    while True:
        nums = [draws.randint(1, 20) for _ in range(draws.choice([3, 4]))]
        target = reach(nums, draws)
        if target.denominator == 1 and 10 <= target <= 100:
            break
    question = (
        f"Make {target} from the numbers {', '.join(map(str, nums))}. Use each of them exactly "
        "once, with + - * / and parentheses. Answer with the expression, such as (1+2)*3.")
    return {"nums": nums, "target": int(target), "question": question}


def main(folder, train=2000, test=200, seed=0):
    draws = random.Random(seed)
    rows = {}
    while len(rows) < train + test:
        row = make_row(draws)
        rows[tuple(sorted(row["nums"])), row["target"]] = json.dumps(row)
    lines = list(rows.values())
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "train.jsonl").write_text("\n".join(lines[:train]) + "\n")
    Path(folder, "test.jsonl").write_text("\n".join(lines[train:]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where train.jsonl and test.jsonl are written")
    main(parser.parse_args().folder)
