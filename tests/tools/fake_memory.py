"""Peak memory of one update of Qwen2.5-3B on a GPU, computed without a GPU and without weights.

    python tests/tools/fake_memory.py [--rows 12 --lora_rank 0 32]

The update's own code runs on fake tensors (torch's FakeTensorMode: sizes and types without data),
and torch's MemTracker adds up the bytes of those that are alive. They are fake CPU tensors, since
torch for CPUs cannot differentiate fake CUDA ones, but in bf16, with a GPU's chunks of the head and
with its product. Not in the sums: the CUDA context and cuBLAS (1 to 2 GB) and fragmentation.

A micro-batch is run twice, so that gradients are summed, and then the optimizer's step. 12 rows of
1,280 tokens are the most that --micro_batch_tokens 16384 allows. Adam's moments are there from the
start, as in every update but the first. It takes half a minute.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common
import grpo
import peft
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen2Config, Qwen2ForCausalLM

QWEN_3B = dict(
    vocab_size=151_936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
    num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
    max_position_embeddings=32768)  # fmt: skip


class Tracker(MemTracker):
    """Only the peak of the whole, since that of every module takes a quarter of an hour.

    And without hooks on the weights: frozen ones take none, and gradients are counted anyway.
    """

    def _update_peak_stats(self, state):
        modules = self.memory_tracking
        self.memory_tracking = {}
        super()._update_peak_stats(state)
        self.memory_tracking = modules

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


class Norm:
    """Stands for a gradient norm, since a fake one has no value to look at."""

    def isfinite(self):
        return True

    def item(self):
        return 1.0


def project(hidden, weight, bias, scale, cap):
    """common.project as on a GPU: no float32 copy of the weight."""
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def make_model(args):
    """As load_policy would leave it on a GPU."""
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(Qwen2Config(**QWEN_3B))
    if args.lora_rank > 0:
        model.requires_grad_(False)
        config = peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")
        # The adapters are where they belong, and fake tensors refuse to be moved.
        with mock.patch.object(torch.nn.Module, "to", lambda self, *given, **more: self):
            peft.inject_adapter_in_model(config, model)
    torch.set_default_dtype(torch.float32)
    model.activation_checkpointing_enable()
    return model.train()


def run(args, sizes):
    """One update; returns bytes: of the weights, the peak of the micro-batches, with the step."""
    rows, prompt, response = sizes
    model = make_model(args)
    optimizer = common.Float32AdamW(model, args)
    optimizer.step(0.0)  # without gradients: now there are moments
    moments = []
    for state in optimizer.adamw.state.values():
        moments += [state["exp_avg"], state["exp_avg_sq"]]
    tracker = Tracker()
    tracker.track_external(model, *optimizer.masters, *moments)
    ids = torch.ones(rows, prompt + response, dtype=torch.long)
    mask = torch.ones(rows, response, dtype=torch.bool)
    weights = torch.ones(rows, response)
    peaks = []
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()  # it follows modules, and must be told of a second pass
            logps, _ = common.token_logps_and_entropies(model, ids, torch.ones_like(ids), response)
            loss, _ = grpo.policy_loss(logps, logps.detach(), None, weights, weights, mask, args)
            loss.backward()
        peaks.append(total(tracker, "peak"))
        optimizer.step(args.learning_rate)
        peaks.append(total(tracker, "peak"))
    return sum(w.numel() * w.element_size() for w in model.parameters()), *peaks


def total(tracker, kind):
    """The bytes of all that is tracked."""
    return tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--lora_rank", type=int, nargs="*", default=[0, 32])
    given = parser.parse_args()

    def clip(*arguments, real=torch.nn.utils.clip_grad_norm_):
        real(*arguments)
        return Norm()

    torch.nn.utils.clip_grad_norm_ = clip
    common.project = project
    common.CHUNK_TOKENS["cpu"] = common.CHUNK_TOKENS["cuda"]
    print("| | weights, GB | peak of the micro-batches | with the step |\n|---|---|---|---|")
    for rank in given.lora_rank:
        args = common.parse_args(grpo.Args, grpo.TINY, ["--model", "?", "--lora_rank", str(rank)])
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = run(args, (given.rows, given.prompt, given.response))
        name = f"--lora_rank {rank}" if rank else "all weights"
        print(f"| {name} | " + " | ".join(f"{x / 1e9:.1f}" for x in found) + " |", flush=True)


if __name__ == "__main__":
    main()
