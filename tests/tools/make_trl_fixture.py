"""Writes tests/trl_fixture.json, what TRL computes from given numbers. Only this file needs TRL.

    python -m venv trl && trl/bin/pip install trl==1.16.0
    trl/bin/python tests/tools/make_trl_fixture.py

A real GRPOTrainer is built on the tiny model, so TRL itself turns its configuration into a loss.
Public arguments hand it the samples (rollout_func) and the rewards (reward_funcs). One method is
replaced, _get_per_token_logps_and_entropies. It returns the log-probs below: the policy's where a
gradient is asked for, the old policy's where none is, and the reference's for the reference model.
What runs is TRL's own

    inputs = trainer._generate_and_score_completions(rows)      rewards -> advantages, masks
    loss   = trainer._compute_loss(model, inputs)               and its gradient in the log-probs

Where TRL's defaults are another algorithm they are set. "dr_grpo" divides by
max_completion_length, our --max_new_tokens, but keeps the std unless scale_rewards is "none". The
KL term is multiplied by the ratio unless use_bias_correction_kl is off.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import trl
from datasets import Dataset

TESTS = Path(__file__).resolve().parent.parent
P, G, C = 3, 4, 9  # prompts, responses per prompt, the maximum length of a response
LENGTHS = [5, 2, 7, 3, 7, 7, 1, 4, 6, 6, 2, 5]  # at most 7, shorter than C: dr_grpo divides by C
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.25, -0.5, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0]  # binary, graded, equal
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
CASES = [  # loss_type, scale_rewards, beta
    ("grpo", "group", 0.0), ("grpo", "group", 0.04), ("dr_grpo", "none", 0.0),
    ("dr_grpo", "none", 0.04)]  # fmt: skip


def given_numbers():
    """Log-probs (B, T) of policy, old policy and reference; the ratio is clipped on both sides."""
    draws = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(P * G, max(LENGTHS), generator=draws) - 0.1
    logps = (old + 0.4 * torch.randn(old.shape, generator=draws)).clamp(max=-0.01)
    ref = (old + 0.3 * torch.randn(old.shape, generator=draws)).clamp(max=-0.01)
    return {"logps": logps, "old_logps": old, "ref_logps": ref}


def rollout_func(prompts, trainer):
    """TRL's interface for samples of one's own: the given lengths of some token."""
    tokenizer = trainer.processing_class
    token = next(i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids)
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[token] * length for length in LENGTHS],
        "logprobs": None,
    }


def make_trainer(rows, loss_type, scale_rewards, beta):
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=P * G, num_generations=G, max_completion_length=C,
        loss_type=loss_type, scale_rewards=scale_rewards, beta=beta, epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        use_bias_correction_kl=False,  # TRL's default multiplies k3 by the ratio (DeepSeek-V3.2)
        num_iterations=2,  # two updates per rollout: only then does TRL ask for the old log-probs
    )
    trainer = trl.GRPOTrainer(
        str(TESTS / "tiny"), reward_funcs=lambda **_: REWARDS, args=config,
        train_dataset=Dataset.from_list(rows), rollout_func=rollout_func)
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop
    trainer.model.train()
    return trainer


def trl_numbers(given, loss_type, scale_rewards, beta):
    rows = [{"prompt": f"{i // G}+1="} for i in range(P * G)]
    trainer = make_trainer(rows, loss_type, scale_rewards, beta)
    logps = given["logps"].clone().requires_grad_()

    def per_token(model, *args, **kwargs):
        if beta and model is trainer.ref_model:
            chosen = given["ref_logps"]
        else:
            chosen = logps if torch.is_grad_enabled() else given["old_logps"]
        return chosen, torch.zeros_like(chosen), None  # log-probs, entropies, no auxiliary loss

    trainer._get_per_token_logps_and_entropies = per_token
    inputs = trainer._generate_and_score_completions(rows)
    assert inputs["completion_mask"].sum(1).tolist() == LENGTHS
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = trainer._metrics["train"]
    return {
        "loss_type": loss_type,
        "scale_rewards": scale_rewards,
        "beta": beta,
        "loss": loss.item(),
        "clip_frac": metrics["clip_ratio/region_mean"][-1],
        "kl": metrics["kl"][-1] if beta else None,
        "advantages": inputs["advantages"].tolist(),
        "gradient": logps.grad.tolist(),
    }


if __name__ == "__main__":
    given = given_numbers()
    fixture = {
        "made_by": f"make_trl_fixture.py, trl {trl.__version__}, torch {torch.__version__}",
        "group_size": G,
        "max_new_tokens": C,
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "lengths": LENGTHS,
        "rewards": REWARDS,
        **{name: values.tolist() for name, values in given.items()},
        "cases": [trl_numbers(given, *case) for case in CASES],
    }
    # Nine digits are all of a float32.
    text = json.dumps(fixture)
    fixture = json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))
    text = json.dumps(fixture).replace('], "', '],\n"').replace("}, {", "},\n{")
    (TESTS / "trl_fixture.json").write_text(text + "\n")
