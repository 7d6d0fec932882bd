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


# --- small batches, and the loss on them ---
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


def make_args(script, **changed):
    """A script's Args for small batches: C is 16."""
    return script.Args(max_new_tokens=16, **changed)


def make_batch(script, kind="random", seed=0, P=3, G=4, T=7, off_mask=0.0, device="cpu"):
    """A rewarded and scored rollout of the given kind, with off_mask where mask is False."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (P * G, 1), generator=draws)
    rewards = (torch.rand(P, G, generator=draws) < 0.5).float()
    entropies = 2 * torch.rand(P * G, T, generator=draws)
    if kind == "all right":
        rewards.fill_(1.0)
    elif kind == "all wrong":
        rewards.fill_(0.0)
    elif kind == "graded" and script is not sign_grpo:  # which takes only 0 and 1
        rewards = torch.randn(P, G, generator=draws)
    elif kind == "flat entropy":
        entropies.fill_(0.7)
    elif kind == "zero entropy":
        entropies.fill_(0.0)
        entropies[:G] = 0.3  # one group has some
    elif kind == "one token":
        lengths.fill_(1)
    elif kind == "empty rows":
        lengths[::3] = 0
    mask = torch.arange(T) < lengths
    old_logps = -3 * torch.rand(P * G, T, generator=draws)
    ref_logps = old_logps + 0.3 * torch.randn(P * G, T, generator=draws)
    scores = {"old_logps": old_logps, "ref_logps": ref_logps, "entropies": entropies}
    scores = {name: x.where(mask, off_mask).to(device) for name, x in scores.items()}
    return script.Batch(rewards=rewards.to(device), mask=mask.to(device), **scores)


def both(script, batch, args):
    """The results of the algorithm's two functions."""
    return script.compute_advantages(batch, args), script.compute_weights(batch, args)


def loss_and_gradient(script, logps, batch, advantages, weights, args, part=(slice(None),) * 2):
    """policy_loss on part of a batch, its gradient in the log-probs, and its metrics."""
    logps = logps.clone().requires_grad_()
    ref_logps = None if batch.ref_logps is None else batch.ref_logps[part]
    loss, metrics = script.policy_loss(
        logps[part], batch.old_logps[part], ref_logps, advantages[part], weights[part],
        batch.mask[part], args)  # fmt: skip
    loss.backward()
    return loss.detach(), logps.grad, metrics
