"""The worked example of docs/algorithms.md: its tables are what the five scripts compute."""

import re

import pytest
import torch
from conftest import ROOT, SCRIPTS

PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
FLAGS = {"ep_grpo": {"buckets": 2}}
ALL_WRONG = [0.0, 0.0, 0.0, 0.0]


def table(name):
    """The rows of a table of the page: dicts of its cells, still as text."""
    text = re.search(f"<!-- worked {name} -->\n(.*?)\n<!-- /worked", PAGE, re.S)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def number(text):
    return float(text.replace("−", "-"))


def agree(text, value):
    """Whether a cell is a number rounded to the digits it shows."""
    digits = len(text.partition(".")[2])
    # An integer such as 0 is exact up to the rounding of float32.
    return abs(number(text) - float(value)) < (0.51 * 10**-digits if digits else 1e-6)


GROUP = table("group")
TOKENS = table("ep_grpo")
LENGTHS = [int(row["length L"]) for row in GROUP]
REWARDS = [number(row["reward r"]) for row in GROUP]


def per_token(column):
    """A column of the token table as (B, T), NaN where there is no token."""
    found = torch.full((len(LENGTHS), max(LENGTHS)), torch.nan)
    for row in TOKENS:
        found[int(row["response"]) - 1, int(row["token"]) - 1] = number(row[column])
    return found


def compute(name, rewards=REWARDS):
    """(advantages, weights) of a script for the group of the page."""
    script = SCRIPTS[name]
    batch = script.Batch(
        mask=torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None],
        rewards=torch.tensor([rewards]),
        entropies=per_token("H"),
        old_logps=per_token("Δ") - 1,
        ref_logps=torch.full((len(LENGTHS), max(LENGTHS)), -1.0),
    )
    args = script.Args(max_new_tokens=8, **FLAGS.get(name, {}))
    return script.compute_advantages(batch, args), script.compute_weights(batch, args)


def check(name, values, rows):
    """Compare a column of a table with one value per response."""
    for i, row in enumerate(rows):
        assert agree(row[name], values[i]), f"{name}, response {i + 1}: {row[name]}, {values[i]}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_weights(name):
    weights = compute(name)[1]
    check(name, weights[:, 0], table("weights"))
    check(name, weights.sum(1), table("totals"))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ep_grpo"])
def test_advantages(name):
    advantages, weights = compute(name)
    assert all(len(row[:length].unique()) == 1 for row, length in zip(advantages, LENGTHS))
    check(name, advantages[:, 0], table("advantages"))
    check(name, (weights * advantages)[:, 0], table("products"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses(name):
    advantages, weights = compute(name)
    check(name, [-(weights * advantages).sum()], table("losses"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_all_wrong(name):
    check(name, compute(name, ALL_WRONG)[0][:, 0], table("all wrong"))


def test_ep_grpo_token_by_token():
    advantages, weights = compute("ep_grpo")
    assert len(TOKENS) == sum(LENGTHS)
    for row in TOKENS:
        at = int(row["response"]) - 1, int(row["token"]) - 1
        assert agree(row["advantage"], advantages[at]), row
        assert agree(row["W · advantage"], (weights * advantages)[at]), row


def test_the_steps_between_by_hand():
    """The columns that compute_advantages keeps to itself, each from the columns before it."""
    outcome = compute("grpo")[0]
    mean, sigma = 1.0, 0.5  # of H, as the page says
    assert per_token("H").nanmean() == mean
    assert (per_token("H") - mean).square().nanmean().sqrt() == sigma
    buckets = {"0": [], "1": []}
    for row in TOKENS:
        buckets[row["bucket"]].append(number(row["Δ"]))
    statistics = {}
    for b, deltas in buckets.items():
        deltas = torch.tensor(deltas, dtype=torch.float64)
        statistics[b] = deltas.mean().item(), deltas.std(correction=0).item()
    assert statistics["0"] == pytest.approx((0.1, 0.1)) and len(buckets["0"]) == 6
    assert statistics["1"] == pytest.approx((0.0, 0.1)) and len(buckets["1"]) == 10
    running = per_token("H").cumsum(1)
    for row in TOKENS:
        i, t = int(row["response"]) - 1, int(row["token"]) - 1
        gate = torch.sigmoid(torch.tensor((number(row["H"]) - mean) / sigma))
        progress = running[i, t] / running[i, LENGTHS[i] - 1]
        mu, spread = statistics[row["bucket"]]
        z = (number(row["Δ"]) - mu) / (spread + 1e-3)
        d = 2 * REWARDS[i] - 1
        expected = {
            "gate": gate, "gate · A": gate * outcome[i, t], "S": running[i, t], "τ": progress,
            "bucket": min(int(2 * progress), 1), "z": z, "d": d, "λ d z": 0.1 * d * z,
        }
        for column, value in expected.items():
            assert agree(row[column], value), (row, column, value)


def test_the_sentences():
    """Numbers that stand in the page's text."""
    assert agree("0.5774", torch.tensor(REWARDS).std())
    assert agree("1.73", (LENGTHS[2] / LENGTHS[0]) ** 0.5)
    products = [number(row["grpo"]) for row in table("products")]
    assert products[2] == pytest.approx(products[1] / 2)  # long failures are cheap per token
