"""docs/faults.md: a number in a test's name is a row of its table, and the row names the file."""

import re

from conftest import ROOT


def test_numbers_in_test_names_are_rows_of_the_table():
    """Fault: a number that means nothing, or a row whose test has moved."""
    lines = (ROOT / "docs/faults.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 65))
    assert all(len(row) == 4 for row in rows)
    files = {row[0]: row[3].split(", ") for row in rows}
    for file in set(sum(files.values(), [])):
        assert (ROOT / "tests" / file).exists()
    for path in (ROOT / "tests").glob("test_*.py"):
        for numbers in re.findall(r"^def test_((?:\d+_and_)*\d+)_", path.read_text(), re.M):
            for number in numbers.split("_and_"):
                assert path.name in files[number], f"{path.name} has a test of {number}"
