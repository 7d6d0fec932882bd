"""How the scripts and common.py are written: the house rules, in numbers.

They stand in place of "under 400 lines", which rewards packing. Tokens cannot be packed.
"""

import ast
import io
import re
import tokenize

from conftest import ROOT, SCRIPTS, every_script

# What a reader meets, in this order, before "# --- machinery ---".
IDEA = ["Args", "TINY_DIR", "TINY", "Batch", "NEEDS_SCORES", "compute_advantages",
        "compute_weights", "compute_reward", "policy_loss", "main"]  # fmt: skip
MAIN_ENDS = {"ep_grpo": 240}  # at most; others 200
TOKENS = {"ep_grpo": 4000}  # at most; others 3500
SECTIONS = ["models", "the optimizer", "log-probs", "the verifier", "data and runs"]
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension,
            ast.Assert)  # fmt: skip
CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def source_of(script):
    return (ROOT / f"{script.__name__}.py").read_text()


def nodes(source, *kinds):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def functions(source):
    """Every function and method by its name: nested ones belong to theirs."""
    tree = ast.parse(source)
    bodies = [tree, *[node for node in tree.body if isinstance(node, ast.ClassDef)]]
    return {x.name: x for body in bodies for x in body.body if isinstance(x, ast.FunctionDef)}


def lines_in(node):
    return node.end_lineno - node.lineno + 1


def branches_in(function):
    """1 + branches, loops, comprehensions and boolean operators."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return count


def tokens_in(source):
    """Names, operators, numbers and strings, docstrings aside."""
    docstrings = set()
    for node in nodes(source, ast.Module, ast.ClassDef, ast.FunctionDef):
        if ast.get_docstring(node) is not None:
            docstrings.add(node.body[0].lineno)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in CODE and token.start[0] not in docstrings for token in found)


def pairs_in(source):
    """How many `a, b = x, y` there are."""
    pairs = 0
    for node in nodes(source, ast.Assign):
        pairs += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return pairs


def test_what_is_counted():
    source = '"""Doc."""\ndef f(x):\n    """More."""\n    return x if x or y else [z for z in x]\n'
    assert branches_in(functions(source)["f"]) == 4
    assert lines_in(functions(source)["f"]) == 3
    assert tokens_in(source) == 6 + 14
    assert pairs_in("a, b = 1, 2\na, b = f()\na = b = 1, 2") == 1


@every_script
def test_order_of_the_names(script):
    names = []
    for node in ast.parse(source_of(script)).body:
        if isinstance(node, ast.Assign):
            names.append(node.targets[0].id)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
    assert names[: len(IDEA)] == IDEA
    main = functions(source_of(script))["main"]
    after = source_of(script).splitlines()[main.end_lineno :]
    assert next(filter(None, after)) == "# --- machinery ---"


@every_script
def test_main_is_short_and_ends_early(script):
    main = functions(source_of(script))["main"]
    assert main.end_lineno <= MAIN_ENDS.get(script.__name__, 200)
    assert lines_in(main) <= 45
    assert branches_in(main) <= 14


@every_script
def test_no_function_is_long(script):
    for name, function in functions(source_of(script)).items():
        assert lines_in(function) <= 50, name


@every_script
def test_tokens(script):
    assert tokens_in(source_of(script)) <= TOKENS.get(script.__name__, 3500)


@every_script
def test_one_statement_per_line(script):
    source = source_of(script)
    assert pairs_in(source) <= 2
    starts = [node.lineno for node in nodes(source, ast.stmt)]
    assert len(starts) == len(set(starts))


@every_script
def test_columns(script):
    assert max(map(len, source_of(script).splitlines())) <= 100


# --- common.py ---
COMMON = (ROOT / "common.py").read_text()


def test_common_does_not_grow():
    """It may shrink: then lower the numbers here."""
    assert len(COMMON.splitlines()) <= 1420
    verifier = COMMON.split("# --- the verifier ---")[1].split("# --- data and runs ---")[0]
    assert len(verifier.splitlines()) <= 249


def test_common_has_100_columns_at_most():
    assert max(map(len, COMMON.splitlines())) <= 100


def test_common_has_five_sections_in_order():
    banners = re.findall(r"^# --- (.+) ---$", COMMON, re.MULTILINE)
    assert [banner[: len(name)] for banner, name in zip(banners, SECTIONS)] == SECTIONS
    assert len(banners) == 5


def test_common_knows_no_algorithm():
    shared = SCRIPTS["grpo"].Args.__dataclass_fields__.keys()
    names = set(SCRIPTS)
    for script in SCRIPTS.values():
        names |= script.Args.__dataclass_fields__.keys() - shared
    assert {"length_alpha", "alpha", "gate_sharpness"} <= names
    assert not re.findall(rf"\b(?:{'|'.join(names)})\b", COMMON)
