"""How far sampling and training disagree in bf16, with the head's logits in float32 and in bf16.

    python tests/tools/bf16_logps.py MODEL DATA.jsonl

MODEL is a small real model on the CPU, which is told to use bf16 as on a GPU. Prints means over the
response tokens of |log-prob while sampling - log-prob of one forward|, which the scripts log as
sampling_logp_diff, and the worst response's mean.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import common
import grpo


def measure(model_name, data, prompts=12, tokens=40):
    args = grpo.Args(model=model_name, eval_dataset=data, steps=0, max_new_tokens=tokens)
    model, tokenizer = common.load_model(model_name, "cpu", trainable=False)
    _, problems = grpo.load_problems(tokenizer, args)
    problems = problems[:prompts]
    streams = [grpo.random_stream(0, "draws", i) for i in range(len(problems))]
    batch = grpo.rollout(model, tokenizer, problems, 1, args, streams)
    scored, _ = grpo.score(model, batch, args)
    difference = (batch.sampled_logps - scored).abs().where(batch.mask, 0.0)
    rows = difference.sum(1) / batch.mask.sum(1)
    return (difference.sum() / batch.mask.sum()).item(), rows.max().item()


def main(model_name, data):
    real = common.project

    def rounded(*given):  # as a head does that leaves its logits in the weights' precision
        return real(*given).bfloat16().float()

    print("| weights | logits | mean | worst response |\n|---|---|---|---|")
    for dtype, project in (
        (torch.float32, real), (torch.bfloat16, real), (torch.bfloat16, rounded),
    ):  # fmt: skip
        common.DTYPES["cpu"] = dtype
        common.project = project
        mean, worst = measure(model_name, data)
        logits = "bf16" if project is rounded else "float32"
        print(f"| {str(dtype).removeprefix('torch.')} | {logits} | {mean:.2g} | {worst:.2g} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
