"""Random mutations of realistic completions, to see that no text makes the verifier raise, hang or grow.

    python tests/fuzz_verify.py [how many, 100000] [seed, 0]

Prints what raised, what was slow, memory at every tenth, verdicts out of time, and the rate of plain ones.
"""

import json
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
from common import gold_answer, verify, verify_timeouts  # noqa: E402

CODE = sys.modules[verify.__module__]
PHRASES = ["Answer: $\\boxed{%s}$.", "So \\boxed{%s}", "= %s\n\\[\\boxed{%s}\\]", "thus\n#### %s", "\\boxed{x = %s}"]
TOKENS = r"""
    \frac \sqrt { } ^ _ \text{ \boxed{ \fbox{ #### , . - + / ! = ( ) [ ] | & \\ \pm \cdot \times10^ % $ \% x e 9 0 99999
    \left( \right) \infty \circ \sin \int \sum_{k=1}^{9} \begin{pmatrix} π √ ° − ∪ ⁸ ٣ 𝟒 ???
""".split()
TOKENS += [" or ", "\n", " ", "\ud800", "\x00"]


def golds():
    for file in sorted((Path(__file__).parent / "samples").glob("*.jsonl")):
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
            text = text[:at] if random.random() < 0.1 else text[:at] + random.choice("0123456789abxyz{}\\") + text[at:]
    return text


def megabytes(pid="self"):
    path = Path(f"/proc/{pid}/status")
    return int(path.read_text().split("VmRSS:")[1].split()[0]) / 1024 if path.exists() else float("nan")


def main(count=100_000, seed=0):
    rng, answers = random.Random(seed), list(golds())
    raised, slowest, paid, start = [], [], 0, time.monotonic()
    for n in range(count):
        gold = rng.choice(answers)
        phrase, answer = rng.choice(PHRASES), rng.choice((gold, gold, rng.choice(answers)))
        completion = mutate(mutate("Let us see: 3 + 4 = 7. ", rng) + phrase.replace("%s", mutate(answer, rng)), rng)
        before = time.monotonic()
        try:
            paid += verify(completion, gold)
        except Exception as error:
            raised.append((repr(error), completion, gold))
        slowest = sorted([*slowest, (time.monotonic() - before, completion, gold)], reverse=True)[:5]
        if (n + 1) % max(1, count // 10) == 0:
            process = CODE.library["process"]
            memory = f"{megabytes():.1f} MB here, {megabytes(process.pid) if process else 0:.1f} MB in the worker"
            print(f"{n + 1} in {time.monotonic() - start:.0f} s, {len(raised)} raised, {memory}", flush=True)
    print(f"{paid / count:.1%} paid, {len(raised)} raised, {verify_timeouts()} out of time, slowest:")
    for seconds, completion, gold in slowest:
        print(f"  {seconds:.2f} s  {completion!r} against {gold!r}")
    for error in raised[:10]:
        print("  raised", *error)
    completion, start = "She makes 9 * 2 = 18 dollars a day. " * 12 + r"The answer is \boxed{18}.", time.process_time()
    for _ in range(50_000):
        verify(completion, "18")
    print(f"{50_000 / (time.process_time() - start):.0f} plain verdicts a second")
    return bool(raised)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
