"""Writes trl_fixture.json: what TRL computes for given numbers. Not run by the tests, and the only file that needs TRL.

    python -m venv trl && trl/bin/pip install trl==1.16.0 && trl/bin/python tests/make_trl_fixture.py

A real GRPOTrainer is built on the tiny model, so that TRL itself turns its configuration into a loss. Public arguments
hand it the samples (`rollout_func`) and the rewards (`reward_funcs`). Only one method is replaced,
`_get_per_token_logps_and_entropies`: it returns the log-probs below, those of the policy where a gradient is asked for,
those of the old policy where none is, and those of the reference for the reference model. What runs is TRL's own

    inputs = trainer._generate_and_score_completions(rows)      rewards -> advantages, masks
    loss   = trainer._compute_loss(model, inputs)               and its gradient in the log-probs

Where TRL's defaults are another algorithm they are set: "dr_grpo" divides by max_completion_length, our
--max_new_tokens, but leaves the std scaling on unless scale_rewards is "none"; the KL term is multiplied by the ratio
unless use_bias_correction_kl is off.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import trl
from datasets import Dataset

HERE = Path(__file__).parent
P, G, C = 3, 4, 9  # prompts, responses each, the longest a response may be
LENGTHS = [5, 2, 7, 3, 7, 7, 1, 4, 6, 6, 2, 5]  # T = 7 columns, shorter than C: dr_grpo must divide by C
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.25, -0.5, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0]  # binary, graded, all equal
EPSILON, EPSILON_HIGH = 0.2, 0.28


def given_numbers():
    """Log-probs of policy, old policy and reference, (B, T), far enough apart that the clip binds on both sides."""
    draws = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(P * G, max(LENGTHS), generator=draws) - 0.1
    logps = (old + 0.4 * torch.randn(old.shape, generator=draws)).clamp(max=-0.01)
    ref = (old + 0.3 * torch.randn(old.shape, generator=draws)).clamp(max=-0.01)
    return {"logps": logps, "old_logps": old, "ref_logps": ref}


def trl_numbers(given, loss_type, scale_rewards, beta):
    rows = [{"prompt": f"{i // G}+1="} for i in range(P * G)]

    def rollout_func(prompts, trainer):
        tokenizer = trainer.processing_class
        token = next(i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids)
        return {"prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts], "logprobs": None,
                "completion_ids": [[token] * length for length in LENGTHS]}

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=P * G,
        num_generations=G, max_completion_length=C, loss_type=loss_type, scale_rewards=scale_rewards, beta=beta,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH,
        use_bias_correction_kl=False,  # k3 as GRPO has it; TRL's default multiplies it by the ratio (DeepSeek-V3.2)
        num_iterations=2,  # two updates a rollout: only then does TRL ask for the old log-probs
    )
    trainer = trl.GRPOTrainer(str(HERE / "tiny"), reward_funcs=lambda **_: REWARDS, args=config,
                              train_dataset=Dataset.from_list(rows), rollout_func=rollout_func)
    trainer.current_gradient_accumulation_steps = 1  # what the training loop sets
    trainer.model.train()
    logps = given["logps"].clone().requires_grad_()

    def per_token(model, *args, **kwargs):
        if beta and model is trainer.ref_model:
            chosen = given["ref_logps"]
        else:
            chosen = logps if torch.is_grad_enabled() else given["old_logps"]
        return chosen, torch.zeros_like(chosen), None  # log-probs, entropies (for a metric only), no auxiliary loss

    trainer._get_per_token_logps_and_entropies = per_token
    inputs = trainer._generate_and_score_completions(rows)
    assert inputs["completion_mask"].sum(1).tolist() == LENGTHS
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    clip_frac = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    return {"loss_type": loss_type, "scale_rewards": scale_rewards, "beta": beta, "loss": loss.item(),
            "clip_frac": clip_frac, "kl": trainer._metrics["train"]["kl"][-1] if beta else None,
            "advantages": inputs["advantages"].tolist(), "gradient": logps.grad.tolist()}


if __name__ == "__main__":
    given = given_numbers()
    fixture = {
        "made_by": f"make_trl_fixture.py, trl {trl.__version__}, torch {torch.__version__}",
        "group_size": G, "max_new_tokens": C, "clip_low": EPSILON, "clip_high": EPSILON_HIGH,
        "lengths": LENGTHS, "rewards": REWARDS, **{name: values.tolist() for name, values in given.items()},
        "cases": [trl_numbers(given, loss_type, scale_rewards, beta)
                  for loss_type, scale_rewards in (("grpo", "group"), ("dr_grpo", "none")) for beta in (0.0, 0.04)],
    }
    rounded = json.loads(json.dumps(fixture), parse_float=lambda text: float(f"{float(text):.9g}"))  # all of a float32
    (HERE / "trl_fixture.json").write_text(json.dumps(rounded).replace('], "', '],\n"').replace("}, {", "},\n{") + "\n")
