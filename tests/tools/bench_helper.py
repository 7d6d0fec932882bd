"""Time and memory of token_logps_and_entropies beside the plain way, TRL's and an older version's.

    OMP_NUM_THREADS=1 python tests/tools/bench_helper.py
    OMP_NUM_THREADS=1 python tests/tools/bench_helper.py --before ../yesterday

--before names a folder with another common.py. TRL takes part where it is installed.

One forward and backward of a model without layers (embedding, norm, head), so that the head is what
is measured. Time is CPU time, all ways in one process, in alternating rounds; the median, and that
of the rounds' ratios. Memory is measured for each way in a fresh process: the highest resident
memory beyond what was there before, the gradient of the head included. Linux only.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import token_logps_and_entropies
import torch
from transformers import LlamaConfig, LlamaForCausalLM

try:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax
except ImportError:
    selective_log_softmax = None

PROMPT = 8  # tokens before the response
SIZES = {"batch": 16, "tokens": 256, "vocab": 32768, "hidden": 256}


def full_logits(model, ids, mask, length):
    out = model(ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False)
    return out.logits[:, :-1]  # (B, T, V)


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


def find_ways(before):
    ways = {"naive": naive}
    if selective_log_softmax:
        ways["trl"] = trl
    if before:
        spec = importlib.util.spec_from_file_location("before", Path(before) / "common.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ways["before"] = module.token_logps_and_entropies
    return ways | {"ours": token_logps_and_entropies}


def setup(args):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=0,
        num_attention_heads=4)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.get_input_embeddings().requires_grad_(False)  # its gradient is no part of the head's work
    return model, torch.randint(args.vocab, (args.batch, PROMPT + args.tokens))


def run(way, model, ids, length):
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    logps, entropies = way(model, ids, torch.ones_like(ids), length)
    logps.sum().backward()
    return time.process_time() - start, logps.detach(), entropies, model.lm_head.weight.grad


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024  # MiB


def measure_memory(args):
    way = find_ways(args.before)[args.memory_of]
    model, ids = setup(args)
    run(way, model, ids[:1, : PROMPT + 4], 4)  # libraries set up their own buffers first
    model.zero_grad(set_to_none=True)
    start = resident("VmRSS")
    run(way, model, ids, args.tokens)
    print(resident("VmHWM") - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (SIZES | {"rounds": 7}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--before", help="folder with another common.py")
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        return measure_memory(args)

    ways = find_ways(args.before)
    command = [sys.executable, __file__, *[f"--{name}={getattr(args, name)}" for name in SIZES]]
    if args.before:
        command += ["--before", args.before]
    memory = {}
    for way in ways:
        out = subprocess.check_output([*command, "--memory_of", way], text=True)
        memory[way] = float(out.split()[-1])

    model, ids = setup(args)
    seconds = {way: [] for way in ways}
    results = {}
    for _ in range(args.rounds):
        for way in ways:
            elapsed, *results[way] = run(ways[way], model, ids, args.tokens)
            seconds[way].append(elapsed)

    sizes = ", ".join(f"{name} {getattr(args, name):,}" for name in SIZES)
    print(f"{sizes}; float32, forward and backward, {args.rounds} alternating rounds, "
          f"{torch.get_num_threads()} thread(s), torch {torch.__version__}")  # fmt: skip
    print("The last three: the largest differences to ours, and the relative one of the gradient\n")
    print("| | CPU s | ours / it | MiB | ours / it | log-probs | entropies | gradient |")
    print("|---" * 8 + "|")
    for way in ways:
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds[way]))
        logps, entropies, grad = [a - b for a, b in zip(results[way], results["ours"])]
        cells = [
            way, f"{statistics.median(seconds[way]):.2f}", f"{ratio:.2f}", f"{memory[way]:.0f}",
            f"{memory['ours'] / memory[way]:.3f}", f"{logps.abs().max():.0e}",
            f"{entropies.abs().max():.0e}", f"{grad.norm() / results['ours'][2].norm():.0e}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
