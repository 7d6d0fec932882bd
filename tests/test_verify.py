"""The verifier: the tables of docs/verifier.md, and the faults that users report (24 to 33)."""

import contextlib
import functools
import itertools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tools import fuzz_verify

from common import gold_answer, verify

HERE = Path(__file__).parent
CODE = sys.modules[verify.__module__]  # where verify lives, for the tests that look inside

# The tables of docs/verifier.md: gold, answer in the box, whether they are equal, why.
DOCS = (HERE.parent / "docs" / "verifier.md").read_text()
CASES = [
    [cell.strip().removeprefix("`").removesuffix("`") for cell in line.strip("| ").split(" | ")]
    for line in DOCS.splitlines()
    if line.startswith("| `")
]

# Text that takes for ever to parse, to evaluate or to simplify.
BOMBS = {
    "tower": "9^{9^{9^{9}}}",
    "huge power": "10^{10^{10}}+1",
    "factorials": "9!!!!!!!!",
    "huge factorial": "(10^9)!",
    "sum": r"\sum_{k=1}^{10^{10}} k^k",
    "integral": r"\int \frac{\sin(x^2)}{\log(x)+x^x} dx",
    "expansion": "(a+b+c+d)^{80}",
    "binomial": r"\binom{10^8}{10^7}",
    "1 MB of digits": "9" * 1_000_000,
    "450 digits": "9" * 450,
    "450 terms": "1" + "+1" * 240,
    "100,000 braces": "{" * 100_000 + "}" * 100_000,
    "100,000 fractions": r"\frac{1}{" * 100_000 + "2" + "}" * 100_000,
    "11 fractions": r"\frac{1}{" * 11 + "2" + "}" * 11,
    "100,000 roots": r"\sqrt{" * 100_000 + "2" + "}" * 100_000,
    "200 brackets": "(" * 200 + "1" + ")" * 200,
    "exponent of e": "1e999999999",
    "unicode": "𝟒𝟐" * 200,
}


def boxed(answer):
    return f"Let me think. The answer is \\boxed{{{answer}}}."


def cpu_seconds(function):
    """CPU time, here and in the worker; its start is not counted. A machine may be busy."""
    verify(boxed(r"\sqrt{8}"), r"2\sqrt{2}")
    CODE.library_equal.cache_clear()
    verify(boxed(r"\sqrt{8}"), r"2\sqrt{2}")  # a worker is running
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker = worker_seconds()
    start = time.process_time()
    function()
    took = time.process_time() - start
    if CODE.library["process"].poll() is None:
        return took + worker_seconds() - worker
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took + ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime - worker


def worker_seconds():
    fields = (
        Path(f"/proc/{CODE.library['process'].pid}/stat").read_text().rpartition(")")[2].split()
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module", autouse=True)
def library_runs():
    """Started before anything is timed."""
    assert verify(boxed(r"\sqrt{8}"), r"2\sqrt{2}") == 1


def run_script(tmp_path, body):
    """A script of the user's, without a __main__ guard, as `python script.py`."""
    script = tmp_path / "script.py"
    script.write_text(body)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parent), *sys.path]),
    }
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env
    )


def gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def parents():
    """The parents of all running processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            found.add(path.read_text(errors="replace").rpartition(")")[2].split()[1])
    return found


# --- what counts as equal ---


@pytest.mark.parametrize(
    "gold, answer, equal, why", CASES, ids=[f"{gold} | {answer}" for gold, answer, _, _ in CASES]
)
def test_table(gold, answer, equal, why):
    assert verify(boxed(answer), gold) == (equal == "yes"), why


def test_the_tables_are_read_whole():
    assert len(CASES) == DOCS.count(" | yes | ") + DOCS.count(" | no | ") > 180
    for row in CASES:
        assert len(row) == 4 and row[2] in ("yes", "no") and row[3].endswith("."), row


# More inputs of each kind that the tables show: gold, answers that are equal, answers that are not.
KINDS = [
    ("5", [r"5\text{ m/s}", r"5 \text{ cm}^2", r"\(5\)"], [r"5\text{ feet 6 inches}"]),
    ("2", [], [r"2\text{/3 cups}", r"2\text{.5 hours}", r"2\text{ 000 dollars}", "2 mn dollars"]),
    ("3", ["3 miles"], ["3 mil dollars", "3 grand dollars", r"3\text{ bn dollars}"]),
    ("12", [], [r"12\text{ to 13 hours}", r"12\text{ remainder 2 items}", "12 degrees below zero"]),
    ("No", ["no", r"\text{NO}"], ["on", "nO", "yes"]),
    ("100000", ["1e+5", "1E5"], ["1e+4", "1e-5"]),
    (r"\log_{10} 2", ["0.301029996"], ["0.302", "2"]),
    ("(1,2)", [r"\bigl(1,2\bigr)"], [r"\bigl(2,1\bigr)"]),
    ("x^2+1=0", ["-x^2-1=0", "2x^2+2=0", "x^2=-1"], ["0=0", "x^2+1=1", "x^2-1=0", "2=0", "x^4=1"]),
    (r"\cos x=3", [r"3=\cos x"], ["1=0", r"\cos x=4", "x=3", "2=1"]),
    ("x^2+y^2=25", ["25=y^2+x^2", r"\frac{x^2+y^2}{5}=5"], ["x^2+y^2=5", "25", "0=0", "25=25"]),
    ("y=5", ["5", "y = 5", "y=5.0"], ["y=6", "z=5", "2y=10", r"y=\sqrt{25}", "5=5", "y-5=0"]),
    ("I_1=7", ["I_{1} = 7"], ["I_2=7", "I_1=8"]),
    ("2+2=4", ["2+2=4"], ["1+1=2", "0=0", "5=6"]),
    ("8d", [r"8 \cdot d", "2d+6d"], ["8", "8h", "8c"]),
    ("4cm+c", ["c+4cm"], ["4cm", "5", "c"]),
    ("3h+2", ["2+3h"], ["3", "5", "2", "3h"]),
    ("2s", ["s+s", "2 s"], ["2", "2t", r"2\text{ s}"]),
    ("7", ["7 cm", "7 kg", "7 days", "7 people", r"7\mathrm{ km}", "7 dollars per day", "7cm"], []),
    ("7", [r"7 \text{ m}^2", "7 cubic feet", r"7\,\mathrm{cm}", r"\textbf{7}", "7 months"], []),
    (
        "7",
        [],
        ["7 tenths", "7 hundred", "7 halves", "7 dozens", "7 billion", "7 times two", "7 by 2"],
    ),
    (
        "7",
        [],
        [r"7\mathit{ hundred}", r"7\operatorname{mod} 2", "7 sevenths", "7 doubled", "7 none"],
    ),
    ("7", [], ["7 million dollars", r"7\text{ billion miles}", "7 point five feet"]),
    ("7", [], ["7 choose 2", "7 twelfths of pies", "7 fifteenths", "7 is", "7 lakhs", "7 thirds"]),
    ("7", [], ["7 or eight", "7 if even", "7 cannot", "7x", "7ab", "7 i", "7 e", r"7\mathrm{i}"]),
    (
        "7",
        [],
        [r"7\text{ not }", "7 times less", "7 never", "7 in base eight", "7!", "7 squared miles"],
    ),
    (
        r"\frac{3}{4}",
        [r"\frac{3}{4}\text{ miles}", r"\frac34 \textit{hours}", "3/4 cups", ".75"],
        [],
    ),
    (
        r"\frac{3}{4}",
        [],
        [r"\frac{3}{4} \text{ million}", "3/4 dozen", r"\frac{3}{4}x", r"3 \div 4"],
    ),
    ("g''(x)", ["g''(x)"], ["g'(x)", "g(x)", "g'" + "''(x)"]),
    ("x'+2x", ["2x+x'"], ["x+2x", "3x", "x''+2x"]),
    ("2,2,3", ["3,2,2", r"\{2,3,2\}"], ["2,3,3", "2,3", "2,2,2,3"]),
    (r"\sqrt2,\sqrt2,\pi", [r"\pi,\sqrt2,\sqrt2"], [r"\pi,\pi,\sqrt2"]),
    ("a=3, b=4", ["b=4, a=3", "a=3 and b=4", "3, 4"], ["4, 3", "a=4, b=3", "a=3", "b=3,a=4"]),
    ("x=2", ["x=2", "2"], ["x=1=2", r"x\approx 2", r"x \to 2", r"x\sim2", "1+1=2", "x>2", "x<2"]),
    ("y=x+1", ["x+1", "y-x=1", "y=1+x"], ["y=x=1", r"y \equiv x+1", "y>x+1", "y=x", "x=y+1"]),
    ("9", [], [r"1+3+\cdots+5", "1,...,9", "[9,9]", "(9,9)", r"\{9,9\}", r"\lfloor 9.5 \rfloor"]),
    ("9", [], ["3^2", "|9|", r"\gcd(9,18)", r"\max(8,9)", "10-1", "81/9 + 0", r"9\cdot1", "9+0i"]),
    ("[2,2]", ["[2, 2]"], ["2", "(2,2)", "[2,3]"]),
    ("2Ab", ["2bA"], ["2ab", "2AB", "2aB"]),
    (r"\Gamma+1", [r"1+\Gamma"], [r"\gamma+1", "1.5772156649"]),
    (r"m(\gamma^2-1)", [r"m\gamma^2-m"], ["2", "m", r"\infty"]),
    (r"(-\infty,5]", [r"(-\infty, 5]", r"x\in(-\infty,5]"], [r"(\infty,5]", r"(-\infty,5)"]),
    (r"[0,\infty)", [r"[0,+\infty)", "[0,∞)", "[0,infinity)"], [r"[0,-\infty)", r"(0,\infty)"]),
    (
        "(4,-1)",
        ["(u,v)=(4,-1)", "(x_1,x_2)=(4,-1)", "P=(4,-1)"],
        ["(v,u)=(-1,4)", "4,-1", "(4,-1,0)"],
    ),
    (r"x\ge2", [r"x\geqslant 2", r"x \geq 2", "x>=2", r"2\le x", "x≥2"], ["x>2", r"x\le2", "x=2"]),
    (r"0\le t<4", [r"4>t\ge0", r"0\leq t<4"], [r"0<t<4", r"0\le t\le4", r"4\ge t>0"]),
    (r"x\ne1", [r"x\neq 1", "x ≠ 1"], ["x=1", r"x\ne2"]),
    (r"3\sqrt{7}", ["3sqrt(7)", "3*sqrt(7)", r"\sqrt{63}", "3√7"], ["3*7", "sqrt(7)", "3sqrt(8)"]),
    (
        r"\frac{\pi}{4}",
        ["pi/4", "(pi)/4", r"0.25\pi", r"\frac\pi4"],
        ["pi", "4/pi", "0.785", r"\pi"],
    ),
    ("1,4", ["{1,4}", "4 and 1", "1 or 4", r"\{4,1\}"], ["(1,4)", "[1,4]", "14", "1.4"]),
    (r"\emptyset", [r"\{\}", "∅", r"\varnothing"], ["0", r"\{0\}"]),
    ("2i", [r"\sqrt{-4}", r"2\sqrt{-1}"], ["-2i", "2", r"\sqrt{4}", "2I"]),
    (
        r"\frac{-1\pm\sqrt5}{2}",
        [r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"],
        [r"\frac{-1+\sqrt5}{2}"],
    ),
    (r"\frac{dx}{dt}=kx-a", [r"\frac{dx}{dt} = -a+kx"], ["0=kx-a", r"\frac{x}{t}=kx-a", "kx-a=1"]),
    (
        r"\begin{pmatrix} 2 \\ -6 \end{pmatrix}",
        [r"2\begin{bmatrix} 1 \\ -3 \end{bmatrix}"],
        [
            r"\begin{pmatrix} 2 \\ 6 \end{pmatrix}",
            "(2,-6)",
            r"\begin{pmatrix} 2 & -6 \end{pmatrix}",
            "2",
        ],
    ),
    (r"\log_2 3", [r"\frac{\ln 3}{\ln 2}"], [r"\log_3 2", r"\log 3"]),
    ("A^T", ["A^{T}"], ["A", "A^{2}"]),
    (r"\ln 2+x", [r"x+\ln(2)"], [r"\log 2+x", "x+0.69", "x"]),
    ("5", [r"5\ ", r"5\Big.", r"5\,", r"5\quad", r"5 {\rm cm}", "5£"], [r"5\\", "5_", r"5\quad 6"]),
    (r"6\sqrt{2}", [r"\sqrt{2} \cdot 6"], [r"\sqrt{2}[6]", r"\sqrt{2}+6"]),
    ("f(x)^2-1", ["(f(x)-1)(f(x)+1)"], ["f(x)-1", "f(y)^2-1"]),
    ("f(2)(x+1)", ["xf(2)+f(2)"], ["f(3)(x+1)"]),
    ("A", [r"\textnormal{A}", r"\texttt{A}", r"\textsf {A}", r"\mathrm {A}"], [r"\textnormal{B}"]),
    ("5", [r"5\textnormal{ cm}", r"5 \mathrm {cm}", r"5 \mbox { cm}"], [r"5\texttt{ million}"]),
    ("3100", ["3100", "3.1*10^3"], ["310^2", r"310^{2}"]),
    ("0.01", ["10^{-2}"], ["0.10^2", "-10^{-2}"]),
    ("x^2>3", ["3<x**2", r"x^2 \gt 3", r"3\lt x²"], ["3>x^2", "x^2>=3", "x^2<3"]),
    (r"x\ge1, y<2", ["y<2, 1<=x", r"2>y \text{ and } x\geq 1"], [r"x\le1, y<2", "1<x, y<2"]),
    ("1<x<y", ["y>x>1"], ["1<x>y", "y<x<1", "1>x<y"]),
    ("2000", [r"2\;000", r"2\:000", r"2\>000", "2~000", "€2000", r"\displaystyle 2000"], []),
    ("1 000", [r"\operatorname{1000}", r"\textrm{1000}", r"\mathbf{1000}", r"\mathsf{1000}"], []),
    ("1 000", [r"\hbox{1000}", r"\mathit{1000}"], []),
    (r"1\quad x", [r"1\qquad x"], []),
    (r"\big(1,2\big]", ["(1,2]"], ["(1,2)"]),
    ("2·3x³", [r"2 \cdot 3x^{3}", "6x^3", "2*3*x**3"], ["6x^2"]),
    (r"1±\pi", [r"1+\pi, 1-\pi"], [r"1+\pi"]),
    ("x≤2", [r"x \le 2"], ["x<2"]),
    ("x∈[1,2]", ["[1,2]", r"x \in [1,2]"], ["[1,2)"]),
    (r"\theta+\sin x", ["sin(x) + theta"], ["theta + sin(y)"]),
    (r"\cos x+\tan x+\ln x+\log x", ["log(x)+ln(x)+tan(x)+cos(x)"], ["2ln(x)+tan(x)+cos(x)"]),
    (r"\{x", [r"\{x"], ["x"]),  # no brace that the box has to close
    (r"\sqrt{x^2+y}+y", [r"y+\sqrt{y+x^2}"], [r"\sqrt{x^2+y}"]),
]


@pytest.mark.parametrize(
    "gold, right, wrong", KINDS, ids=[f"{gold} {n}" for n, (gold, _, _) in enumerate(KINDS)]
)
def test_kinds(gold, right, wrong):
    assert [answer for answer in right if verify(boxed(answer), gold) != 1] == []
    assert [answer for answer in wrong if verify(boxed(answer), gold) != 0] == []


# --- 24: golds ---


@pytest.mark.parametrize(
    "raw, answer",
    [
        (r"\frac{14}{3}", r"\frac{14}{3}"),
        ("Half of 10 is 5. #### this is no number yet\n#### 1,234", "1,234"),
        ("#### -10", "-10"),
        ("#### 1/2", "1/2"),
        (r"First \boxed{1}, so $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (27, "27"),
        (27.0, "27"),
        (-0.5, "-0.5"),
        (1e22, "10000000000000000000000"),
        (["9.6\n"], "9.6"),
        (["4", "4\n"], "4"),
        ('["34"]', "34"),  # a list that is written as a string
        ("['34']", "34"),
        (' [ "34" ]\n', "34"),
        (r'["\\frac{1}{2}"]', r"\frac{1}{2}"),
        (r'["\frac{1}{2}"]', r"\frac{1}{2}"),  # by somebody who forgot to escape
        ("[1,2]", "[1,2]"),  # an interval
    ],
)
def test_24_gold_forms(raw, answer):
    assert gold_answer(raw) == answer
    assert gold_answer(gold_answer(raw)) == answer
    assert verify(boxed(answer), raw) == 1


@pytest.mark.parametrize(
    "alternatives", [["alpha", "beta", "gamma", "delta"] * 3, [str(n) * 62 for n in range(1, 10)]]
)
def test_24_many_alternatives_are_read_again_one_by_one(alternatives):
    """Fault: together they are too long or too many words, which ends a run in the middle."""
    gold = gold_answer(alternatives)
    assert gold_answer(gold) == gold
    assert verify(boxed(alternatives[-1]), gold) == 1 and verify(boxed("7"), gold) == 0


def test_24_a_list_written_as_a_string_holds_alternatives():
    gold = gold_answer(r'["\\sqrt{2}", "x, y"]')
    assert [verify(boxed(x), gold) for x in (r"\sqrt{2}", "y, x", "x", r"\sqrt{3}")] == [1, 1, 0, 0]


def test_24_words_that_only_look_like_placeholders_are_golds():
    for raw in ("no solution", "solution A", "proof by cases", "undefined", "no", "not a function"):
        assert verify(boxed(raw), raw) == 1
    assert gold_answer(r"\infty") == r"\infty"


def test_24_a_gold_with_alternatives():
    gold = gold_answer(["0.01\n", "0.02\n"])
    assert gold_answer(gold) == gold
    assert [verify(boxed(x), gold) for x in ("0.01", "0.02", "0.03", "0.01, 0.02")] == [1, 1, 0, 0]


UNREADABLE = [
    None,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "",
    "  ",
    "nan",
    "None",
    [],
    [None],
    ["1", ""],
    {},
]
UNREADABLE += [
    b"5",
    "????",
    r"\frac{1}{",
    "}{",
    r"so \boxed{5",
    "#### ",
    "1" * 1_000_000,
    "{" * 100_000,
]
UNREADABLE += [
    "proof",
    "Proof",
    r"\text{Proof}",
    "notfound",
    "not found",
    "N/A",
    "none",
    "see solution",
    '["proof"]',
]
UNREADABLE += ["See the solution.", "null", "unknown", "omitted", "[]", '[""]', "inf"]
UNREADABLE += [
    "There are 16 eggs and she eats three of them, then she sells the rest for 2 dollars each."
]


@pytest.mark.parametrize("raw", UNREADABLE, ids=[repr(raw)[:20] for raw in UNREADABLE])
def test_24_an_unreadable_gold_is_an_error(raw):
    for read in (
        gold_answer,
        lambda raw: verify(boxed("5"), raw),
        lambda raw: verify("no answer", raw),
    ):
        with pytest.raises(ValueError) as error:
            read(raw)
        assert type(error.value).__name__ == "BadInput"
        assert len(str(error.value)) < 200
        assert not isinstance(raw, str) or repr(raw.strip('["]')[:10])[1:-1] in str(error.value)


FULL = os.environ.get("RLVR_DATA")
NAMES = ("gsm8k", "math500", "amc23", "aime24", "minerva", "svamp")


def golds(folder, name):
    files = sorted(Path(folder).glob(f"{name}*.jsonl"))
    assert files, f"no {name}*.jsonl in {folder}"
    return [json.loads(line)["answer"] for file in files for line in file.open()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", [HERE / "samples", FULL], ids=["samples", "full"])
def test_24_every_gold_equals_itself(folder, name):
    if folder is None:
        pytest.skip("RLVR_DATA names no folder with the whole files")
    for raw in golds(folder, name):
        gold = gold_answer(raw)
        assert gold_answer(gold) == gold
        for alternative in raw if isinstance(raw, list) else [gold]:
            assert verify(boxed(alternative.strip()), raw) == 1, raw


@pytest.mark.parametrize("name", NAMES)
def test_another_problems_gold_earns_nothing(name):
    answers = [gold_answer(raw) for raw in golds(HERE / "samples", name)]
    for gold, other in itertools.chain(zip(answers, answers[1:]), zip(answers, answers[3:])):
        if gold.replace(" ", "").replace("\\!", "") != other.replace(" ", "").replace("\\!", ""):
            assert verify(boxed(other), gold) == 0, (gold, other)


# --- 25: where the answer stands ---


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        (r"\boxed{2} wait \boxed{3}", "3", 1),
        (r"\boxed{2} wait \boxed{3}", "2", 0),
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"\boxed{\{1,2\}}", "2,1", 1),
        (r"\boxed{\text{so } \boxed{5}}", "5", 1),
        (r"\fbox{5}", "5", 1),  # what LaTeX puts a frame around outside of mathematics
        (r"\boxed {5}", "5", 1),
        (r"\boxed{ 5 }", "5", 1),
        (r"\boxed{5", "5", 0),  # cut off
        (r"\boxed{5} no, \boxed{6", "5", 0),  # an earlier box was not the last word
        (r"\boxed{5} no, \boxed{6", "6", 0),
        ("#### 5 \\boxed{6", "5", 0),
        (r"\boxed{}", "5", 0),
        (r"\boxed{5}. I had to use \boxed for it.", "5", 1),  # without a brace it is no box
        (r"\boxed 5", "5", 0),
        (r"\boxed{6} #### 5", "5", 0),  # a box comes before ####
        ("#### 42", "42", 1),
        ("#### 42 eggs, not 43", "42", 1),
        ("#### 42 eggs, not 43", "43", 0),
        ("#### 41\n#### 42", "42", 1),
        ("####42", "42", 1),
        ("#### **42**", "42", 1),
        ("#### $1,234.00.", "1234", 1),
        ("#### -5", "-5", 1),
        ("#### -5", "5", 0),
        ("#### 1/2", "0.5", 1),
        ("#### 28%", "28", 1),
        ("#### 41,42", "41", 0),
        ("#### 42.", "42", 1),
        ("#### 42 dollars\nThe answer is 43.", "42", 1),
        ("#### 42. I am sure", "42", 1),
        ("#### 42+1", "42", 0),
        ("#### 42 - 1", "42", 0),
        ("#### 42=43", "42", 0),
        ("#### 42 million", "42", 0),
        ("#### 42 000", "42", 0),
        ("#### 42 000", "42000", 1),
        (r"#### 42\cdot 2", "42", 0),
        ("#### 42 * 2", "42", 0),
        ("#### 42/2", "42", 0),
        ("#### 42/2", "21", 1),
        ("#### 42^2", "42", 0),
        ("#### 42!", "42", 0),
        ("#### 42x", "42", 0),
        ("#### 40 + 2 = 42", "42", 0),
        ("#### 40 + 2 = 42", "40", 0),
        ("#### 42 or 43", "42", 0),
        ("#### 42, 43", "42", 0),
        ("#### 42, or 43", "42", 0),
        ("#### 42 is wrong", "42", 0),
        ("#### Paris", "Paris", 0),  # not a number
        (r"#### \sqrt{2}", r"\sqrt{2}", 0),
        (r"#### \frac{1}{2}", "0.5", 1),
        ("#### 10^6", "10", 0),
        ("#### 1e5", "1", 0),
        ("#### Step 1: add 2", "1", 0),
        ("####", "5", 0),
        ("The answer is 5.", "5", 0),
        ("5", "5", 0),
        ("", "5", 0),
    ],
)
def test_25_the_last_box_else_the_number_after_hashes(completion, answer, reward):
    assert verify(completion, answer) == reward


# --- 26 to 29 ---


def test_26_spraying_earns_nothing():
    numbers = [str(n) for n in range(1, 101)]
    sprays = [
        "41 or 42",
        "41, 42",
        "41,42",
        "42, 42",
        r"41 \text{ or } 42",
        r"41 \text{ and } 42",
        "41; 42",
    ]
    sprays += [
        r"\{41, 42\}",
        r"41 \quad 42",
        "41 42",
        "41/42",
        r"42 \pm 1",
        "x = 41, x = 42",
        "[41,42]",
        "41|42",
    ]
    sprays += ["41 & 42", "(41, 42)"]
    sprays += [
        sep.join(numbers) for sep in (",", ", ", " ", " or ", r" \text{ or } ", r"\\", "=", ";")
    ]
    assert [spray for spray in sprays if verify(boxed(spray), "42")] == []
    assert verify(r"\boxed{41} \boxed{42} \boxed{43}", "42") == 0


def test_27_thousands_tuples_and_signs():
    for answer in ("1,234", "$1,234.00", r"\$1{,}234", "1{,}234", "1234"):
        assert verify(boxed(answer), "1,234") == verify(boxed("1234"), answer) == 1
    assert (
        verify(boxed("0,1"), "1") == verify(boxed("0,1"), "0.1") == verify(boxed("1"), "0,1") == 0
    )
    assert verify(boxed("-5"), "5") == verify(boxed("5"), "-5") == 0


def test_28_percent_units_text_and_degrees():
    answers = [
        "28",
        r"28\%",
        "28 %",
        r"28 \text{ cm}",
        r"28 \mbox{ inches}^2",
        r"28^\circ",
        "28°",
        "28 degrees",
    ]
    for answer in [*answers, r"\text{28}"]:
        for gold in ("28", r"28\%", r"28^{\circ}", r"28\text{ eggs}"):
            assert verify(boxed(answer), gold) == 1, (gold, answer)
            assert verify(boxed(answer), gold.replace("28", "0.28")) == 0, (gold, answer)


def test_29_rationals_exactly_decimals_within_a_millionth():
    assert verify(boxed("1/2^{98}"), "1/2^{99}") == 0
    assert verify(boxed(f"1/{2**98}"), f"1/{2**99}") == 0
    assert verify(boxed(f"1/{2**99}"), "1/2^{99}") == 1
    assert verify(boxed(str(10**300 + 1)), str(10**300)) == 0
    assert verify(boxed(f"{10**300 + 1}/3"), f"{10**300}/3") == 0
    near_half = ("0.5000004", "0.50001", "5e-1", "1/2", "500001/1000000")
    assert [verify(boxed(x), "0.5") for x in near_half] == [1, 0, 1, 1, 0]
    tiny = ("1e-20", "1e-30", "0", r"10^{-20}", r"1.0 \times 10^{-20}", "-10^{-20}")
    assert [verify(boxed(x), "1e-20") for x in tiny] == [1, 0, 0, 1, 1, 0]
    assert [verify(boxed(x), "1e999") for x in ("1e999", "1e998", "0.5")] == [1, 0, 0]
    assert verify(boxed(r"\sqrt{2}+0.001"), r"\sqrt{2}") == 0


# --- 30 to 33: hostile text ---


@pytest.mark.parametrize("name", BOMBS)
def test_30_bombs_earn_nothing_in_time(name, monkeypatch):
    monkeypatch.setattr(CODE, "CPU_SECONDS", 0.3)  # the list of bombs below has the limit as it is
    rewards = []
    assert (
        cpu_seconds(lambda: rewards.append(verify(boxed(BOMBS[name]), r"\frac{\sqrt{2}}{3}"))) < 1
    )
    assert set(rewards) == {0}


def test_30_long_completions():
    texts = [
        r"\boxed{" * 100_000,
        r"\boxed{1}" * 100_000,
        r"\boxed" + " " * 1_000_000,
        r"\boxed{" + "{" * 1_000_000,
    ]
    texts += ["#" * 1_000_000, "#### " + "1," * 500_000, "#### " + "9" * 1_000_000]
    for text in texts:
        assert cpu_seconds(functools.partial(verify, text, r"\sqrt{2}")) < 2
        assert verify(text, "42") == 0


def test_30_a_list_of_bombs_has_one_limit():
    bombs = ", ".join(f"9^{{9^{{9^{n}}}}}" for n in range(2, 9))
    assert cpu_seconds(lambda: verify(boxed(bombs), r"\pi, 2\pi, 3\pi, 4\pi, 5\pi, 6\pi, 7\pi")) < 2


def test_30_a_verdict_of_many_questions_has_one_limit():
    CODE.library_equal.cache_clear()
    verify(boxed(r"\sqrt{7}, \sqrt{11}"), r"\sqrt{7+0}, \sqrt{13}")
    assert CODE.budget.seconds < CODE.CPU_SECONDS  # what the first question took is gone
    CODE.budget.seconds = 0.02
    with pytest.raises(TimeoutError):
        CODE.library_equal(r"\sqrt{7}", "9^{9^{9^{6}}}")
    assert CODE.library["process"].returncode == -signal.SIGPROF


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_30_what_ran_out_of_time_is_killed():
    verify(boxed("5^{5^{5^{5^{5}}}}"), r"\sqrt{2}")
    parent = str(CODE.library["process"].pid)
    for _ in range(100):
        if parent not in parents():
            return
        time.sleep(0.1)
    pytest.fail("a child of the worker is still running after ten seconds")


def test_30_the_library_cannot_take_all_memory():
    assert verify(boxed("7^{7^{9}}-7^{7^{9}}"), "0") in (0, 1)  # ends, by time or by memory
    assert verify(boxed(r"\sqrt{8}"), r"2\sqrt{2}") == 1  # and harms nobody else


def test_30_caches_are_bounded():
    for function in (CODE.library_equal,):
        assert function.cache_info().maxsize


def test_30_timeouts_are_counted_and_nothing_else(monkeypatch):
    monkeypatch.setattr(CODE, "CPU_SECONDS", 0.3)
    before = CODE.library["timeouts"]
    for answer in (r"\sqrt{3}", r"\frac{", "???", "41", r"\foo", "1+" * 100, BOMBS["200 brackets"]):
        assert verify(boxed(answer), r"\sqrt{2}") == 0
    assert CODE.library["timeouts"] == before
    verify(boxed("3^{3^{3^{3^{3}}}}"), r"\sqrt{2}")
    assert CODE.library["timeouts"] == before + 1
    verify(
        boxed("3^{3^{3^{3^{3}}}}"), r"\sqrt{2}"
    )  # a verdict that ran out of time is not remembered
    assert CODE.library["timeouts"] == before + 2


def test_31_in_threads_at_the_same_time(monkeypatch):
    monkeypatch.setattr(CODE, "CPU_SECONDS", 0.3)
    results = {}

    def work(n):
        bomb = verify(boxed(f"9^{{9^{{9^{{9}}}}}}+{n}"), r"\sqrt{2}")
        results[n] = bomb, verify(boxed(rf"\sqrt{{{n * n * 2}}}"), rf"{n}\sqrt{{2}}")

    before = CODE.library["timeouts"]
    threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: (0, 1) for n in range(2, 4)}
    assert CODE.library["timeouts"] == before + 2


def test_31_the_callers_alarm_goes_off_as_set():
    rang = []
    old = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert verify(boxed("9^{9^{9^{7}}}"), r"\sqrt{2}") == 0
        while not rang and time.monotonic() < start + 10:
            time.sleep(0.05)
        assert rang and rang[0] - start >= 0.5
        assert signal.getsignal(signal.SIGALRM) is not old
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_31_after_an_interruption_no_verdict_gets_anothers_reply():
    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            verify(boxed("9^{9^{9^{8}}}"), r"\sqrt{2}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    for n in range(20, 24):
        assert verify(boxed(rf"\sqrt{{{n * n * 5}}}"), rf"{n}\sqrt{{5}}") == 1
        assert verify(boxed(rf"\sqrt{{{n * n * 5 + 1}}}"), rf"{n}\sqrt{{5}}") == 0


def test_32_text_is_never_evaluated(tmp_path):
    made = tmp_path / "made"
    for text in (
        f"__import__('os').mkdir('{made}')",
        f"exec(\"open({str(made)!r}, 'w')\")",
        f"open('{made}','w')",
    ):
        for answer in (text, rf"\text{{{text}}}", f"={text}", f"1,{text}"):
            assert verify(boxed(answer), "42") == verify(f"#### {answer}", "42") == 0
        CODE.budget.seconds = 1
        assert not CODE.library_equal("42", text)
    assert not made.exists()


def test_33_gold_and_answer_are_not_swapped(monkeypatch):
    calls = []
    monkeypatch.setattr(CODE, "library_equal", lambda gold, text: calls.append((gold, text)))
    verify(boxed(r"\sqrt{3}"), r"\sqrt{2}")
    verify(boxed(r"\sqrt{3},\sqrt{7}"), r"\sqrt{2},\sqrt{5}")
    verify(boxed(r"x=\sqrt{3}"), r"\sqrt{2}")
    assert calls and all(gold in (r"\sqrt{2}", r"\sqrt{5}") for gold, _ in calls)
    assert all(text in (r"\sqrt{3}", r"\sqrt{7}") for _, text in calls)
    assert verify("5", r"\boxed{5}") == 0


# --- model text never raises, and the process behind it is well behaved ---


ODD = [
    None,
    5,
    5.0,
    b"\\boxed{5}",
    [],
    "\ud800",
    "\x00",
    "\\",
    "\\boxed{\\",
    "\\boxed{\ud800\x00}",
    r"\boxed{\ud800}",
]


@pytest.mark.parametrize("completion", ODD, ids=ascii)
def test_any_completion_gives_a_verdict(completion):
    assert verify(completion, "5") == 0
    assert verify(completion, r"\sqrt{2}") == 0


def test_mutations_raise_nothing_and_take_no_time():
    """The tool does 100,000."""
    rng = random.Random(1)
    answers = list(fuzz_verify.golds())
    for _ in range(3000):
        gold = rng.choice(answers)
        completion = fuzz_verify.mutate(
            boxed(fuzz_verify.mutate(rng.choice((gold, rng.choice(answers))), rng)), rng
        )
        assert verify(completion, gold) in (0, 1)


NO_LIMIT = """
import resource
import sys
def refuse(*_):
    sys.stderr.write("refused")
    raise ValueError("current limit exceeds maximum limit")
resource.setrlimit = refuse
"""


def test_without_a_memory_limit_it_works(tmp_path):
    """Fault: on macOS the worker did not start, and the message was about math-verify."""
    (tmp_path / "sitecustomize.py").write_text(NO_LIMIT)
    worker = subprocess.run(
        CODE.WORKER,
        input=json.dumps([60, r"\sqrt{8}", r"2\sqrt{2}"]) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "refused" in worker.stderr  # the limit was asked for
    assert json.loads(worker.stdout.splitlines()[-1])[0] is True


WAITING = """
import signal, time
alarm = signal.alarm
def wait(seconds):
    alarm(min(seconds, 1))
    time.sleep(30 if seconds else 0)
signal.alarm = wait
"""


def test_a_worker_that_waits_without_computing_ends(tmp_path):
    """Fault: a limit in CPU seconds alone lets a verdict wait for ever."""
    (tmp_path / "sitecustomize.py").write_text(WAITING)
    worker = subprocess.run(
        CODE.WORKER,
        input=json.dumps([60, r"\sqrt{8}", r"2\sqrt{2}"]) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert worker.returncode == -signal.SIGALRM


def test_a_busy_machine_changes_no_verdict():
    """Fault: with limits in wall-clock seconds, right answers earned 0 on a busy machine."""
    CODE.library_equal.cache_clear()
    pid = CODE.library["process"].pid
    threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP)).start()  # while it computes
    threading.Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    assert verify(boxed("x" + "+1" * 240), "x+1+239") == 1
    assert CODE.library["process"].pid == pid


def test_numbers_never_reach_the_library(monkeypatch):
    monkeypatch.setattr(CODE, "library_equal", None)  # not even callable
    golds = ["18", "-0.5", "1,234", r"\frac{3}{7}", r"4\frac12", r"3\times 10^{-8}", r"28\%"]
    golds += [r"\$5", "x=6", "7 cm"]
    others = [
        "3!",
        r"\sqrt{4}",
        "x+1",
        "[7,7]",
        "x^2=4",
        "1,2",
        "words",
        r"\binom{3}{2}",
        "9^{9^9}",
    ]
    for gold in golds:
        assert [answer for answer in golds + others if verify(boxed(answer), gold)] == [gold]


def test_verdicts_are_floats():
    for answer in ("5", "6", r"\frac{10}{2}", r"\sqrt{25}", "5, 6", "???"):
        assert type(verify(boxed(answer), "5")) is float


def test_plain_verdicts_are_fast():
    completion = "She has 16 - 3 - 4 = 9 eggs, and so 9 * 2 = 18 dollars. " * 8 + boxed("18")
    rates = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(10_000):
            verify(completion, "18")
        rates.append(10_000 / (time.process_time() - start))
    assert max(rates) > 50_000


def test_the_worker_is_restarted_after_a_kill():
    before = CODE.library["timeouts"]
    for n in (11, 13):
        os.kill(CODE.library["process"].pid, signal.SIGKILL)
        assert verify(boxed(rf"\sqrt{{{n * n * 3}}}"), rf"{n}\sqrt{{3}}") == 1
    assert CODE.library["timeouts"] == before


def test_a_forked_process_starts_its_own_worker(monkeypatch):
    """Fault: two processes with one pipe read each other's replies."""
    pid = CODE.library["process"].pid
    monkeypatch.setitem(CODE.library, "owner", 0)  # as a child process finds it
    assert verify(boxed(r"\sqrt{23^2\cdot3}"), r"23\sqrt{3}") == 1
    assert CODE.library["process"].pid != pid
    monkeypatch.setitem(CODE.library, "owner", os.getpid())


def test_the_worker_leaves_ctrl_c_to_the_caller():
    pid = CODE.library["process"].pid
    os.kill(pid, signal.SIGINT)
    assert verify(boxed(r"\sqrt{19^2\cdot3}"), r"19\sqrt{3}") == 1
    assert CODE.library["process"].pid == pid


SCRIPT = f"""
import sys
print("top", flush=True)
import {verify.__module__} as code
assert code.verify(r"\\boxed{{\\sqrt{{8}}}}", r"2\\sqrt{{2}}") == 1
print(code.library["process"].pid, flush=True)
"""


def test_the_worker_runs_nothing_of_the_callers_and_ends_with_it(tmp_path):
    process = run_script(
        tmp_path, SCRIPT + "sys.stdin.readline()"
    )  # waits for ever: nothing is written to it
    assert process.stdout.readline() == "top\n"
    pid = int(process.stdout.readline())
    if Path(f"/proc/{pid}/maps").exists():
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        assert os.readlink(f"/proc/{pid}/fd/2") == "/dev/null"
    process.kill()
    assert (
        process.stdout.read() == ""
    )  # the worker neither printed "top" again nor holds the pipe open
    process.wait()
    assert gone(pid)


def test_a_script_ends_although_the_worker_is_at_work(tmp_path):
    bomb = r'target=code.verify, args=(r"\boxed{9^{9^{9^9}}}", r"\sqrt{2}"), daemon=True'
    bomb = f"code.threading.Thread({bomb}).start()"
    process = run_script(tmp_path, SCRIPT + bomb)
    assert process.communicate(timeout=60)[0].startswith("top\n")
    assert process.returncode == 0
