"""The five scripts are one diff apart: the same to the byte but for the algorithm.

Three things may differ: the docstring, the fields under "# --- algorithm ---" in Args, and the
block between "# --- algorithm ---" and "# --- the same in all five scripts from here on ---".
"""

import ast
import dataclasses
import io
import re
import subprocess
import tokenize

import pytest
from conftest import ROOT, SCRIPTS, every_script

import grpo

FIELDS_MARK = "    # --- algorithm ---\n"
BLOCK_MARK = "\n\n# --- algorithm ---\n"
END_MARK = "\n# --- the same in all five scripts from here on ---\n"
# Lines and hunks of `diff grpo.py <script>.py`, docstrings aside. They may only shrink.
DIFFS = {"dr_grpo": (5, 2), "sign_grpo": (12, 2), "length_alpha": (6, 3), "ep_grpo": (41, 3)}
every_variant = pytest.mark.parametrize("name", DIFFS)


def code(name):
    """A script's text without its docstring."""
    source = (ROOT / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0]
    assert ast.get_docstring(ast.parse(source))
    return "".join(source.splitlines(keepends=True)[docstring.end_lineno :])


def cut(name):
    """The text in five parts: shared, the algorithm's fields, shared, its block, shared."""
    source = code(name)
    for mark in FIELDS_MARK, BLOCK_MARK, END_MARK:
        assert source.count(mark) == 1
    head, rest = source.split(FIELDS_MARK)
    fields, rest = rest.split("\n\nTINY_DIR = ", 1)
    middle, rest = rest.split(BLOCK_MARK)
    block, tail = rest.split(END_MARK)
    return head, fields, middle, block, tail


def shared_parts(name):
    return cut(name)[::2]


@every_variant
def test_all_but_the_algorithm_is_the_same_to_the_byte(name):
    assert shared_parts(name) == shared_parts("grpo")


@every_script
def test_the_block_is_one_constant_and_two_functions(script):
    constant, *functions = ast.parse(cut(script.__name__)[3]).body
    assert ast.unparse(constant.targets[0]) == "NEEDS_SCORES"
    names = ["compute_advantages", "compute_weights"]
    for function, name in zip(functions, names, strict=True):
        assert (function.name, ast.unparse(function.args)) == (name, "batch, args")
        assert getattr(script, name).__module__ == script.__name__  # nothing is imported


@every_script
def test_the_algorithms_flags_are_fields_and_come_last(script):
    assert all(line.startswith("    ") for line in cut(script.__name__)[1].splitlines())
    shared = [field.name for field in dataclasses.fields(grpo.Args)]
    names = [field.name for field in dataclasses.fields(script.Args)]
    assert names[: len(shared)] == shared
    own = {"length_alpha": 2, "ep_grpo": 6}
    assert len(names) - len(shared) == own.get(script.__name__, 0)


@every_script
def test_no_algorithms_name_in_code(script):
    """A run's name comes from __file__. Only the algorithm's own comments and help may name one."""
    words = re.compile(r"grpo|length_?alpha|\bsign\b|\bep\b", re.IGNORECASE)
    for part in shared_parts(script.__name__):
        assert not words.findall(part)
    for token in tokenize.generate_tokens(io.StringIO(code(script.__name__)).readline):
        if token.type == tokenize.NAME:
            assert not re.findall("grpo|length_alpha", token.string, re.IGNORECASE)


@every_variant
def test_the_diff_does_not_grow(name, tmp_path):
    for script in SCRIPTS:
        (tmp_path / script).write_text(code(script))
    command = ["diff", tmp_path / "grpo", tmp_path / name]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    lines = sum(line[0] in "<>" for line in shown)
    hunks = sum(line[0].isdigit() for line in shown)
    assert (lines, hunks) == DIFFS[name], "if it has shrunk, lower the number here"
