"""What the tests rely on: the scripts can be imported, nothing is downloaded, sums come in one order, few problems."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with 40 of the tiny model's training problems and 8 of its test problems: quick to load."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in ("train", 40), ("test", 8):
        lines = (ROOT / f"tests/tiny/{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)
