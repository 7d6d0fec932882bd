"""Write one-step sums in words for a small real model: train.jsonl and test.jsonl.

    python tests/tools/make_words.py runs/words

The runs in docs/runs/smollm.jsonl used them. Each problem follows two worked examples, which show a
small model the form of an answer. The test problems have 15 pairs of numbers, which no training
problem has in the same order. Seeded: the same files each time.
"""

import json
import random
import sys
from pathlib import Path

EXAMPLES = (
    "Sam had 4 cups and got 3 more. How many cups are there now?\n"
    "Answer: 4 + 3 = 7, \\boxed{7}\n\n"
    "Question: Eve had 9 cards and lost 2. How many cards are there now?\n"
    "Answer: 9 - 2 = 7, \\boxed{7}\n\n"
    "Question: "
)
NAMES = "Tom Ana Lee Mia Kim Max Ivy Ned".split()
THINGS = "apples books pens coins toys hats eggs keys".split()


def make_problems():
    """{split: [(question, answer, pair of numbers), ...]}."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    rng.shuffle(pairs)
    splits = {}
    for split, some, count in (("train", pairs[15:], 500), ("test", pairs[:15], 200)):
        rows = []
        for a, b in some:
            for name in NAMES:
                thing = rng.choice(THINGS)
                had = f"{EXAMPLES}{name} had"
                ask = f"How many {thing} are there now?"
                rows.append((f"{had} {a} {thing} and got {b} more. {ask}", a + b, (a, b)))
                rows.append((f"{had} {a + b} {thing} and lost {b}. {ask}", a, (a, b)))
        rng.shuffle(rows)
        splits[split] = rows[:count]
    return splits


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_problems().items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for question, answer, _ in rows:
                file.write(json.dumps({"question": question, "answer": answer}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
