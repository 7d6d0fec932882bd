"""Time and memory of token_logps_and_entropies beside the plain way and, where trl is installed, TRL's.

    OMP_NUM_THREADS=1 python tests/bench_helper.py [--batch 16 --tokens 256 --vocab 32768 --hidden 256 --rounds 7]

One forward and backward of a model without layers (embedding, norm, head), so that the head is what is measured. CPU
time: all ways in one process, in alternating rounds; the median, and that of the rounds' ratios. Memory: each way in a
fresh process, the highest resident memory beyond what stood before, the gradient of the head included. Linux only.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import token_logps_and_entropies

try:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax
except ImportError:
    selective_log_softmax = None

PROMPT = 8  # tokens before the completion


def full_logits(model, ids, mask, length):
    return model(ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False).logits[:, :-1]  # (B, T, V)


def naive(model, ids, mask, length):
    logq = full_logits(model, ids, mask, length).log_softmax(-1)  # (B, T, V)
    with torch.no_grad():
        entropies = -(logq.exp() * logq).sum(-1)
    return logq.gather(-1, ids[:, -length:, None]).squeeze(-1), entropies


def trl(model, ids, mask, length):
    logits = full_logits(model, ids, mask, length)  # (B, T, V)
    logps = selective_log_softmax(logits, ids[:, -length:])
    with torch.no_grad():
        return logps, entropy_from_logits(logits)


WAYS = {"naive": naive, "trl": trl, "ours": token_logps_and_entropies}


def setup(args):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=0, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    model.get_input_embeddings().requires_grad_(False)  # its gradient is no part of the head's work
    return model, torch.randint(args.vocab, (args.batch, PROMPT + args.tokens))


def run(way, model, ids, length):
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    logps, entropies = WAYS[way](model, ids, torch.ones_like(ids), length)
    logps.sum().backward()
    return time.process_time() - start, logps.detach(), entropies, model.lm_head.weight.grad


def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024  # MiB


def measure_memory(args):
    model, ids = setup(args)
    run(args.memory_of, model, ids[:1, : PROMPT + 4], 4)  # libraries set up their own buffers first
    model.zero_grad(set_to_none=True)
    start = resident("VmRSS")
    run(args.memory_of, model, ids, args.tokens)
    print(resident("VmHWM") - start)


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"batch": 16, "tokens": 256, "vocab": 32768, "hidden": 256, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory_of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        return measure_memory(args)

    ways = [way for way in WAYS if way != "trl" or selective_log_softmax]
    sizes = [f"--{name}={getattr(args, name)}" for name in ("batch", "tokens", "vocab", "hidden")]
    command = [sys.executable, __file__, *sizes, "--memory_of"]
    memory = {way: float(subprocess.check_output([*command, way], text=True).split()[-1]) for way in ways}

    model, ids = setup(args)
    seconds, results = {way: [] for way in ways}, {}
    for _ in range(args.rounds):
        for way in ways:
            elapsed, *results[way] = run(way, model, ids, args.tokens)
            seconds[way].append(elapsed)

    print(f"B {args.batch}, T {args.tokens}, V {args.vocab}, hidden {args.hidden}, float32, forward and backward, "
          f"{args.rounds} alternating rounds, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    print("The last three columns: the largest differences to ours, for the head's gradient their relative norm.")
    print(f"{'':6}{'CPU s':>9}{'ours/it':>9}{'MiB':>8}{'ours/it':>9}{'logps':>9}{'entropies':>11}{'gradient':>10}")
    for way in ways:
        ratio = statistics.median(ours / it for ours, it in zip(seconds["ours"], seconds[way]))
        logps, entropies, grad = (a - b for a, b in zip(results[way], results["ours"]))
        grad = grad.norm() / results["ours"][2].norm()
        print(f"{way:6}{statistics.median(seconds[way]):9.2f}{ratio:9.2f}{memory[way]:8.0f}"
              f"{memory['ours'] / memory[way]:9.3f}{logps.abs().max():9.0e}{entropies.abs().max():11.0e}{grad:10.0e}")
    if not selective_log_softmax:
        print("trl is not installed: pip install trl in another environment to see its row.")


if __name__ == "__main__":
    main()
