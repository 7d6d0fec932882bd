"""Everything that only a GPU can tell, in one run of about four minutes, without a download.

    python tests/gpu_check.py            # Qwen2.5-0.5B and 3B shapes, random weights, bf16, on CUDA
    python tests/gpu_check.py --smoke    # the same code on CPU with a toy shape: does the check itself work?

Prints Markdown tables: rollout tokens a second by rollout path, the log-prob helper beside the plain way, and for every
script three whole steps with update time, peak memory, and the first update's largest |ratio - 1| and KL; checks that
the optimizer's weights are float32 and hold updates that bf16 would swallow.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common
import grpo

SCRIPTS = ("grpo", "dr_grpo", "sign_grpo", "length_alpha", "ep_grpo")
SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    "toy": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
}


def make_model(shape, folder, vocab):
    """A random model of a given shape as an ordinary folder, with the tiny tokenizer, shorter than the vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=vocab, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=257,
                         max_position_embeddings=4096, **SHAPES[shape])  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tests" / "tiny").save_pretrained(folder)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak():
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(function):
    synchronize()
    started = time.perf_counter()
    result = function()
    synchronize()
    return result, time.perf_counter() - started


def compare_rollouts(model, tokenizer, tokens):
    """Our loop, generate, and continuous batching, on 8 prompts x 8 samples."""
    prompts = [list(range(40, 60 + 5 * i)) for i in range(8)]
    args = argparse.Namespace(max_new_tokens=tokens, temperature=1.0)
    width = max(map(len, prompts))
    ids = torch.tensor([[258] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    sampling = dict(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=258, eos_token_id=257)

    def ours():
        return int(grpo.rollout(model, tokenizer, prompts, 8, args, torch.Generator().manual_seed(0))[2].sum())

    def generate():
        out = model.generate(ids, attention_mask=mask, num_return_sequences=8, **sampling)[:, width:]
        return int((out != 258).sum())

    def continuous():
        settings = GenerationConfig(num_return_sequences=8, **sampling)
        batching = ContinuousBatchingConfig(max_memory_percent=0.2)
        out = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
        return sum(len(request.generated_tokens) for request in out.values())

    print("\n| rollout | tokens | seconds | tokens/s | peak GiB |\n|---|---|---|---|---|")
    for name, path in (("ours", ours), ("generate", generate), ("generate_batch", continuous)):
        try:
            path()  # warm up
            reset_peak()
            count, seconds = timed(path)
            print(f"| {name} | {count} | {seconds:.2f} | {count / seconds:.0f} | {peak():.1f} |")
        except Exception as error:  # a path that this version or machine does not offer must not end the check
            print(f"| {name} | failed: {type(error).__name__}: {str(error)[:80]} | | | |")


def compare_helper(model, rows, length):
    """token_logps_and_entropies beside log_softmax over model(...).logits, forward and backward."""
    ids = torch.randint(0, 256, (rows, 32 + length), device=model.device)
    mask = torch.ones_like(ids)

    def naive():
        logq = model(ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1].float().log_softmax(-1)
        entropies = -(logq.detach().exp() * logq.detach()).sum(-1)
        return logq.gather(-1, ids[:, -length:, None]).squeeze(-1), entropies

    def ours():
        return common.token_logps_and_entropies(model, ids, mask, length)

    print("\n| helper | seconds, forward + backward | peak GiB | largest difference in log-probs |\n|---|---|---|---|")
    reference = None
    for name, way in (("naive", naive), ("ours", ours)):
        for round in range(2):  # the first warms up
            reset_peak()
            (logps, _), forward = timed(way)
            _, backward = timed(lambda out=logps: out.sum().backward())
            model.zero_grad(set_to_none=True)
        reference = logps.detach() if reference is None else reference
        difference = (logps.detach() - reference).abs().max().item()
        print(f"| {name} | {forward + backward:.2f} | {peak():.1f} | {difference:.1e} |")
        del logps


def run_scripts(folder, tokens, out, sizes):
    columns = ("script", "rollout s/step", "update s/step", "tokens/step", "peak GiB", "max abs(ratio - 1)", "KL")
    print("\n|" + "|".join(columns) + "|\n" + "|---" * len(columns) + "|")
    for name in SCRIPTS:
        script = importlib.import_module(name)
        script.save_checkpoint = lambda *arguments: None  # 45 GB a checkpoint at 3B: not what is measured here
        ratios, policy_loss = [], script.policy_loss

        def watch(logps, old_logps, ref_logps, advantages, weights, args, policy_loss=policy_loss, ratios=ratios):
            ratios.append((torch.exp(logps - old_logps)[weights != 0] - 1).abs().max().item())
            return policy_loss(logps, old_logps, ref_logps, advantages, weights, args)

        script.policy_loss = watch
        reset_peak()
        flags = ["--model", folder, "--dataset", str(ROOT / "tests" / "tiny"), "--output_dir", f"{out}/{name}",
                 "--steps", "3", "--max_new_tokens", str(tokens), "--eval_problems", "8", "--eval_samples", "1",
                 "--warmup_steps", "0", "--beta", "0.04", *sizes]  # fmt: skip
        script.main(script.parse_args(flags))
        lines = [json.loads(line) for line in open(f"{out}/{name}/metrics.jsonl")]
        steps = [line for line in lines if "reward" in line]
        rollout, update, count = (sum(step[key] for step in steps[1:]) / 2  # the first step warms up
                                  for key in ("seconds_rollout", "seconds_update", "tokens"))
        print(f"| {name} | {rollout:.1f} | {update:.1f} | {count:.0f} | {peak():.1f} | {ratios[0]:.1e} "
              f"| {steps[0]['kl']:.1e} |")


def check_masters(model):
    """Updates of 1e-6 on bf16 weights must add up in the masters."""
    masters = common.float32_masters(model)
    assert all(master.dtype == torch.float32 for master in masters)
    weight, before = masters[0], masters[0].flatten()[:4].clone()
    for _ in range(10):
        weight += 1e-6
    assert torch.allclose(weight.flatten()[:4], before + 1e-5, atol=1e-7)
    print("\nfloat32 masters: ten updates of 1e-6 add up")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="on CPU, with a toy shape")
    smoke = parser.parse_args().smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device: --smoke tries the check itself on the CPU")
    device = "cpu" if smoke else "cuda"
    common.DTYPES["cpu"] = torch.bfloat16
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if not smoke else 'CPU'}")
    for shape in ("toy",) if smoke else ("0.5B", "3B"):
        tokens = 16 if smoke else 256
        sizes = ["--prompts_per_step", "2", "--group_size", "2"] if smoke else []
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            make_model(shape, folder, 1024 if smoke else 151_936)
            print(f"\n## {shape}")
            model, tokenizer = common.load_model(folder, device)
            compare_rollouts(model, tokenizer, tokens)
            compare_helper(model, 2 if smoke else 8, tokens)
            check_masters(model)
            del model
            run_scripts(folder, tokens, f"{folder}/runs", sizes)
            print(f"\n{shape}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
