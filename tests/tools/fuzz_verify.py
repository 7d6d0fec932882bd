"""Random mutations of completions: no text may make the verifier raise, hang or grow.

    python tests/tools/fuzz_verify.py [how many, 100000] [seed, 0]
    python tests/tools/fuzz_verify.py path/to/math500.jsonl

The first prints what raised, what was slow, memory at every tenth, how many verdicts ran out of
time, and the rate of verdicts on numbers. The second measures the answers of one step that are not
numbers: the first 64 such golds of the file, against their own and their neighbour's answer, in CPU
seconds.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS.parent))
from common import gold_answer, verify  # noqa: E402

CODE = sys.modules[verify.__module__]
PHRASES = [
    "Answer: $\\boxed{%s}$.",
    "So \\boxed{%s}",
    "= %s\n\\[\\boxed{%s}\\]",
    "thus\n#### %s",
    "\\boxed{x = %s}",
]
TOKENS = r"""
    \frac \sqrt { } ^ _ \text{ \boxed{ \fbox{ #### , . - + / ! = ( ) [ ] | & \\ \pm \cdot
    \times10^ % $ \% x e 9
    0 99999
    \left( \right) \infty \circ \sin \int \sum_{k=1}^{9} \begin{pmatrix} π √ ° − ∪ ⁸ ٣ 𝟒 ???
""".split()
TOKENS += [" or ", "\n", " ", "\ud800", "\x00"]


def golds():
    for file in sorted((TESTS / "samples").glob("*.jsonl")):
        for line in file.open():
            yield gold_answer(json.loads(line)["answer"])


def mutate(text, random):
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 8))):
        at = random.randrange(len(text) + 1)
        end = min(len(text), at + random.randrange(6))
        change = random.randrange(6)
        if change == 0:
            text = text[:at] + text[end:]
        elif change in (1, 2):
            text = text[:at] + random.choice(TOKENS) + text[at:]
        elif change == 3:
            text = text[:end] + text[at:end] * random.randrange(1, 30) + text[end:]
        elif change == 4:
            text = text[:at] + text[end:] + text[at:end]
        else:
            text = (
                text[:at]
                if random.random() < 0.1
                else text[:at] + random.choice("0123456789abxyz{}\\") + text[at:]
            )
    return text


def megabytes(pid="self"):
    path = Path(f"/proc/{pid}/status")
    return (
        int(path.read_text().split("VmRSS:")[1].split()[0]) / 1024
        if path.exists()
        else float("nan")
    )


def main(count=100_000, seed=0):
    rng, answers = random.Random(seed), list(golds())
    raised, slowest, paid, start = [], [], 0, time.monotonic()
    for n in range(count):
        gold = rng.choice(answers)
        phrase, answer = rng.choice(PHRASES), rng.choice((gold, gold, rng.choice(answers)))
        completion = mutate(
            mutate("Let us see: 3 + 4 = 7. ", rng) + phrase.replace("%s", mutate(answer, rng)), rng
        )
        before = time.monotonic()
        try:
            paid += verify(completion, gold)
        except Exception as error:
            raised.append((repr(error), completion, gold))
        slowest = sorted([*slowest, (time.monotonic() - before, completion, gold)], reverse=True)[
            :5
        ]
        if (n + 1) % max(1, count // 10) == 0:
            process = CODE.library["process"]
            worker = megabytes(process.pid) if process else 0
            memory = f"{megabytes():.1f} MB here, {worker:.1f} MB in the worker"
            print(
                f"{n + 1} in {time.monotonic() - start:.0f} s, {len(raised)} raised, {memory}",
                flush=True,
            )
    timeouts = CODE.library["timeouts"]
    print(f"{paid / count:.1%} paid, {len(raised)} raised, {timeouts} out of time, slowest:")
    for seconds, completion, gold in slowest:
        print(f"  {seconds:.2f} s  {completion!r} against {gold!r}")
    for error in raised[:10]:
        print("  raised", *error)
    numbers()
    return bool(raised)


def numbers():
    """Verdicts on golds that are numbers, in each of their forms, per CPU second."""
    prose = "She makes 9 * 2 = 18 dollars a day. " * 12
    forms = (
        "18",
        "1,234",
        "0.75",
        r"\frac{3}{7}",
        "3/7",
        r"4\frac{2}{3}",
        r"3\times 10^8",
        r"28\%",
        "18 eggs",
    )
    pairs = [
        (prose + rf"The answer is \boxed{{{one}}}.", other) for one in forms for other in forms
    ]
    start = time.process_time()
    for _ in range(1000):
        for completion, gold in pairs:
            verify(completion, gold)
    print(f"{1000 * len(pairs) / (time.process_time() - start):.0f} verdicts on numbers per second")


def cpu_seconds():
    """CPU time of this process and of the worker, which runs."""
    path = Path(f"/proc/{CODE.library['process'].pid}/stat")
    fields = path.read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def step(path):
    """64 golds that are not numbers, against their own and their neighbour's answer."""
    answers = [gold_answer(json.loads(line)["answer"]) for line in Path(path).open()]
    chosen = [gold for gold in answers if not CODE.parse_number(CODE.normalize(gold))][:64]
    verify(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")  # starts the worker
    for name, others in ("own", chosen), ("neighbour's", chosen[1:] + chosen[:1]):
        start = cpu_seconds()
        paid = sum(verify(rf"\boxed{{{answer}}}", gold) for gold, answer in zip(chosen, others))
        took = cpu_seconds() - start
        print(f"{len(chosen)} answers, {name}: {paid:.0f} paid in {took:.2f} CPU seconds")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith(".jsonl"):
        step(sys.argv[1])
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
