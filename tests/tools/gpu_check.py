"""What only a GPU can tell, as commands of their own, each of less than three minutes:

    python tests/tools/gpu_check.py rollout     64 x 256 tokens: cuDNN, expandable segments on, off
    python tests/tools/gpu_check.py update      its peak; sampled beside scored log-probs
    python tests/tools/gpu_check.py helper      log-probs and entropies beside the plain way
    python tests/tools/gpu_check.py scripts     three steps of each script, and of one at 3B
    python tests/tools/gpu_check.py processes   two GPUs by torchrun beside one

Random weights in the shapes of Qwen2.5-0.5B and 3B, bf16, no download. --smoke runs the same code
on the CPU with a toy shape: does the check itself work? Prints Markdown tables; GB are 1e9 bytes.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import common
import grpo
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

SCRIPTS = "grpo", "dr_grpo", "sign_grpo", "length_alpha", "ep_grpo"
SHAPES = {
    "0.5B": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "3B": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    "toy": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
}  # fmt: skip
TINY = str(ROOT / "tests" / "tiny")


class Setting:
    """Shapes and sizes on a GPU, or those of --smoke."""

    def __init__(self, smoke):
        self.device = "cpu" if smoke else "cuda"
        self.small, self.large = ("toy", "toy") if smoke else ("0.5B", "3B")
        self.tokens = 16 if smoke else 256
        self.samples = 2 if smoke else 8
        self.prompts = 2 if smoke else 8
        self.vocab = 1024 if smoke else 151_936


def make_model(shape, setting):
    """A random model on the device, and the tiny tokenizer, which knows fewer ids."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=setting.vocab, num_key_value_heads=2, tie_word_embeddings=True,
        eos_token_id=257, max_position_embeddings=4096, **SHAPES[shape])  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with common.find_device(setting.device):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(TINY)


def save_model(shape, folder, setting):
    """The same as an ordinary folder."""
    for part in make_model(shape, setting):
        part.save_pretrained(folder)


def arguments(setting, model, *flags):
    flags = [
        "--max_new_tokens", setting.tokens, "--prompts_per_step", setting.prompts,
        "--group_size", setting.samples, "--model", model, *flags]  # fmt: skip
    return common.parse_args(grpo.Args, grpo.TINY, list(map(str, flags)))


def gigabytes(kind):
    """The peak since the last reset: "allocated" or "reserved"."""
    if not torch.cuda.is_available():
        return "-"
    return f"{getattr(torch.cuda, f'max_memory_{kind}')() / 1e9:.2f}"


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(function):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def draw(model, tokenizer, args):
    problems = []
    for i in range(args.prompts_per_step):
        problems.append({"prompt_ids": list(range(40, 60 + 5 * i)), "question": "?"})
    streams = [grpo.random_stream(0, "draws", i) for i in range(len(problems))]
    return grpo.rollout(model, tokenizer, problems, args.group_size, args, streams)


def table(*columns):
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


# --- rollout ---
def rollout(setting, part):
    """Each allocator setting in a process of its own, since it is read when torch is imported."""
    if part:
        return rollout_part(setting, part)
    table("shape", "expandable segments", "cuDNN", "tokens/s", "allocated GB", "reserved GB")
    for expandable in "True", "False":
        environment = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
        command = [sys.executable, __file__, *sys.argv[1:], "--part", expandable]
        subprocess.run(command, env={**os.environ, **environment}, check=True)


def rollout_part(setting, expandable):
    model, tokenizer = make_model(setting.large, setting)
    args = arguments(setting, "none")
    for cudnn in False, True:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if not cudnn:  # with it every length needs a plan of its own, which is what is measured
            draw(model, tokenizer, args)  # warm up
        reset_peak()
        batch, seconds = timed(lambda: draw(model, tokenizer, args))
        speed = f"{batch.mask.sum().item() / seconds:.0f}"
        cells = ["on" if cudnn else "off", speed, gigabytes("allocated"), gigabytes("reserved")]
        row(setting.large, expandable, *cells)


# --- update ---
def update(setting, part):
    table(
        "shape", "adapters", "seconds", "allocated GB", "reserved GB",
        "mean difference of log-probs", "worst row", "kl")  # fmt: skip
    for shape in dict.fromkeys([setting.small, setting.large]):
        with tempfile.TemporaryDirectory() as folder:
            save_model(shape, folder, setting)
            for rank in 0, 32:
                update_once(setting, folder, shape, rank)


def update_once(setting, folder, shape, rank):
    flags = ["--lora_rank", rank, "--beta", 0.04, "--device", setting.device]
    args = arguments(setting, folder, *flags, "--warmup_steps", 0)
    model, tokenizer = common.load_policy(folder, args)
    reference = common.load_reference(model, args)
    optimizer = common.Float32AdamW(model, args)
    check_float32(optimizer)
    batch = draw(model, tokenizer, args)
    batch.ref_logps, _ = grpo.score(reference, batch, args)
    advantages = torch.ones(batch.mask.shape, device=model.device)
    advantages[::2] = -1
    weights = batch.mask / batch.mask.sum()
    reset_peak()
    sums, seconds = timed(
        lambda: grpo.update(model, optimizer, batch, advantages, weights, 1, args))
    difference = (batch.sampled_logps - batch.old_logps).abs().where(batch.mask, 0.0)
    mean = difference.sum() / batch.mask.sum()
    worst = (difference.sum(1) / batch.mask.sum(1)).max()
    row(shape, rank, f"{seconds:.2f}", gigabytes("allocated"), gigabytes("reserved"),
        f"{mean:.4f}", f"{worst:.4f}", sums["kl"])  # fmt: skip
    assert sums["kl"] == 0, "policy and reference must agree to the bit"
    common.check_sampling(batch)


def check_float32(optimizer):
    """Updates of 1e-6 must add up in the optimizer's weights."""
    master = optimizer.masters[-1]  # the largest weight: those of norms are 1
    assert master.dtype == torch.float32
    before = master.flatten()[:4].clone()
    for _ in range(10):
        master += 1e-6
    assert torch.allclose(master.flatten()[:4], before + 1e-5, rtol=0, atol=1e-7)
    master -= 1e-5


# --- helper ---
def helper(setting, part):
    """token_logps_and_entropies beside log_softmax over model(...).logits, forward and backward."""
    model, _ = make_model(setting.small, setting)
    length = setting.tokens
    ids = torch.randint(0, 256, (setting.samples, 32 + length), device=model.device)
    mask = torch.ones_like(ids)

    def naive():
        logits = model(ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
        logq = logits.float().log_softmax(-1)
        entropies = -(logq.detach().exp() * logq.detach()).sum(-1)
        return logq.gather(-1, ids[:, -length:, None]).squeeze(-1), entropies

    def ours():
        return common.token_logps_and_entropies(model, ids, mask, length)

    table("way", "seconds", "allocated GB", "largest difference in log-probs")
    expected = None
    for way in naive, ours:
        for _ in range(2):  # the first warms up
            reset_peak()
            (logps, _), forward = timed(way)
            _, backward = timed(logps.sum().backward)
            model.zero_grad(set_to_none=True)
        logps = logps.detach()
        expected = logps if expected is None else expected
        difference = f"{(logps - expected).abs().max():.1e}"
        row(way.__name__, f"{forward + backward:.3f}", gigabytes("allocated"), difference)
    z = torch.randn(64, setting.vocab, device=model.device)
    expected = z.softmax(-1)
    assert torch.equal(torch.softmax(z, -1, out=z), expected), "softmax in place is not softmax"


# --- scripts ---
def scripts(setting, part):
    table(
        "shape", "script", "rollout s", "update s", "tokens", "allocated GB", "reserved GB",
        "sampling_logp_diff", "kl")  # fmt: skip
    runs = [(setting.small, name) for name in SCRIPTS] + [(setting.large, "grpo")]
    common.write_checkpoint = lambda *given: None  # 43 GB at 3B: not what is measured here
    with tempfile.TemporaryDirectory() as folder:
        for number, (shape, name) in enumerate(runs):
            model = f"{folder}/{shape}"
            if not Path(model).exists():
                save_model(shape, model, setting)
            run_script(setting, model, name, f"{folder}/run-{number}", shape)


def run_script(setting, model, name, out, shape):
    script = importlib.import_module(name)
    script.evaluate = lambda *given: {}
    reset_peak()
    flags = [
        "--model", model, "--dataset", TINY, "--output_dir", out, "--device", setting.device,
        "--steps", "3", "--max_new_tokens", str(setting.tokens // 2), "--warmup_steps", "0",
        "--prompts_per_step", str(setting.prompts), "--group_size", str(setting.samples),
        "--beta", "0.04"]  # fmt: skip
    script.main(common.parse_args(script.Args, script.TINY, flags))
    steps = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    cells = []
    for key in "seconds_rollout", "seconds_update", "tokens":
        cells.append(f"{sum(step[key] for step in steps[1:]) / 2:.2f}")  # the first warms up
    cells += [gigabytes("allocated"), gigabytes("reserved")]
    row(shape, name, *cells, f"{steps[0]['sampling_logp_diff']:.4f}", steps[0]["kl"])


# --- processes ---
def processes(setting, part):
    """Steps of one and of two processes; with fewer than two GPUs there is nothing to see."""
    if setting.device == "cuda" and torch.cuda.device_count() < 2:
        print("there are fewer than two GPUs")
        return
    table("processes", "seconds per step", "tokens")
    with tempfile.TemporaryDirectory() as folder:
        save_model(setting.small, f"{folder}/model", setting)
        for count in 1, 2:
            out = f"{folder}/{count}"
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(count), str(ROOT / "grpo.py"),
                "--model", f"{folder}/model", "--dataset", f"{TINY}/train.jsonl",
                "--output_dir", out, "--device", setting.device, "--steps", "3",
                "--max_new_tokens", str(setting.tokens), "--save_every", "100",
                "--prompts_per_step", str(setting.prompts)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            steps = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][1:]
            seconds = [step["seconds_rollout"] + step["seconds_update"] for step in steps]
            row(count, f"{sum(seconds) / 2:.2f}", sum(step["tokens"] for step in steps) // 2)


COMMANDS = {f.__name__: f for f in (rollout, update, helper, scripts, processes)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--smoke", action="store_true", help="on the CPU, with a toy shape")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: --smoke tries the check itself on the CPU")
    if given.smoke:
        common.DTYPES["cpu"] = torch.bfloat16
    started = time.perf_counter()
    setting = Setting(given.smoke)
    if not given.part:
        name = "CPU" if given.smoke else torch.cuda.get_device_name()
        print(f"{given.command}: torch {torch.__version__}, {name}")
    COMMANDS[given.command](setting, given.part)
    if not given.part:
        print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
