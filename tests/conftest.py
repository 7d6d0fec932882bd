"""What the tests share: scripts by name, a quick run, small data. Nothing is downloaded."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
import dr_grpo  # noqa: E402
import ep_grpo  # noqa: E402
import grpo  # noqa: E402
import length_alpha  # noqa: E402
import sign_grpo  # noqa: E402

torch.set_num_threads(1)  # sums come in one order

SCRIPTS = {module.__name__: module for module in (grpo, dr_grpo, sign_grpo, length_alpha, ep_grpo)}
TINY = Path(grpo.TINY_DIR)
SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_problems 8".split()


def parse(*flags, script=grpo):
    """Args as from this command line."""
    return common.parse_args(script.Args, script.TINY, [str(flag) for flag in flags])


def run(data, folder, *flags, script=grpo):
    """A small run of a script in this process, in a folder."""
    script.main(parse(*SMALL, "--dataset", data, "--output_dir", folder, *flags, script=script))


def read_jsonl(path):
    """The lines of a .jsonl file; NaN and Infinity are not JSON."""
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def training_lines(folder):
    return [line for line in read_jsonl(Path(folder) / "metrics.jsonl") if "loss" in line]


def evaluation_lines(folder):
    return [line for line in read_jsonl(Path(folder) / "metrics.jsonl") if "loss" not in line]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with 40 of the tiny model's training problems and 8 of its test problems."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in ("train", 40), ("test", 8):
        lines = (TINY / f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(scope="session")
def tiny():
    """The tiny model and its tokenizer; copy them before a change."""
    return common.load_model(grpo.TINY_DIR, "cpu")


@pytest.fixture
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)
