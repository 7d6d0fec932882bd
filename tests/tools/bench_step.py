"""CPU time and memory of whole training steps beside TRL's GRPOTrainer, and how ours grow.

    OMP_NUM_THREADS=1 python tests/tools/bench_step.py            # ours, and TRL's if installed
    OMP_NUM_THREADS=1 python tests/tools/bench_step.py --growth   # double G, T, V, P one at a time

Both do the same work: one random model, 8 prompts x 8 responses of exactly 48 tokens (the stop
token lies outside the vocabulary), one optimizer step, no evaluation, no checkpoint. "small":
hidden 128, 4 layers, V 64; "big": hidden 256, 6 layers, V 32,768. Seconds are CPU time of a step,
the median of those after the first; memory is the highest resident size beyond what there was when
training began, each in a process of its own, in alternating rounds. Linux only.

Ours runs with --micro_batch_tokens 2048 (small) or 512 (big), about 39 or 10 rows at once; TRL with
its default, a step's 64 rows at once.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SIZES = {"small": (128, 4, 64), "big": (256, 6, 32_768)}
BASE = {"P": 8, "G": 8, "T": 48}
STEPS = {"small": 10, "big": 3}
BUDGET = {"small": "2048", "big": "512"}  # --micro_batch_tokens
RUNS = [("grpo", 0), ("grpo", 0.04), ("dr_grpo", 0), ("dr_grpo", 0.04), ("ep_grpo", 0)]


def make_folder(folder, hidden, layers, vocab, train_problems):
    """A random Qwen2, a tokenizer of single characters, and sums to train on."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=3 * hidden, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=vocab + 8)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": vocab + 8}
    words |= {char: i for i, char in enumerate("0123456789+=.", 1)}
    core = Tokenizer(models.WordLevel(words, unk_token="."))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")  # fmt: skip
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(train_problems)]
    for split in ("train", "test"):
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(folder, f"{split}.jsonl").write_text("".join(lines))


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def report(seconds, before):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print("RESULT", json.dumps({"seconds": statistics.median(seconds[1:]), "MiB": peak}))


def reward(text):
    return float(len(text) > 20 and text[-1] in "02468+.")  # mixed, so that no group is silent


def run_ours(name, folder, sizes, steps, extra):
    script = importlib.import_module(name)
    common = sys.modules["common"]
    common.time.perf_counter = time.process_time  # metrics.jsonl then holds CPU seconds
    common.Run.save = lambda *arguments: None
    script.compute_reward = lambda text, problem, length: reward(text)
    rollout = script.rollout
    before = []

    def first_rollout(*arguments):
        before.append(resident())
        return rollout(*arguments)

    script.rollout = first_rollout
    script.evaluate = lambda *arguments: {}
    with tempfile.TemporaryDirectory() as out:
        flags = [
            "--model", folder, "--dataset", folder, "--output_dir", out, "--device", "cpu",
            "--steps", str(steps), "--prompts_per_step", str(sizes["P"]),
            "--group_size", str(sizes["G"]), "--max_new_tokens", str(sizes["T"]),
            "--instruction=", "--no_gradient_checkpointing", *extra]  # fmt: skip
        script.main(common.parse_args(script.Args, script.TINY, flags))
        lines = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    assert all(line["tokens"] == sizes["P"] * sizes["G"] * sizes["T"] for line in lines)
    report([line["seconds_rollout"] + line["seconds_update"] for line in lines], before[0])
    print("UPDATE", statistics.median(line["seconds_update"] for line in lines[1:]))


def run_trl(name, folder, sizes, steps, extra):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments, **keywords):
            seconds.append(-time.process_time())

        def on_step_end(self, *arguments, **keywords):
            seconds[-1] += time.process_time()

    rows = [json.loads(line)["question"] for line in open(f"{folder}/train.jsonl")]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dr = name == "dr_grpo"
    before = resident()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, per_device_train_batch_size=sizes["P"] * sizes["G"],
            num_generations=sizes["G"], max_completion_length=sizes["T"], max_steps=steps,
            beta=float(extra[1]), top_k=0, loss_type="dr_grpo" if dr else "grpo",
            scale_rewards="none" if dr else "group", use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no",
            logging_steps=1000, disable_tqdm=True)  # fmt: skip
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, args=config, callbacks=[Clock()],
            train_dataset=Dataset.from_dict({"prompt": rows}),
            reward_funcs=lambda completions, **_: list(map(reward, completions)))  # fmt: skip
        trainer.train()
    report(seconds, before)


def measure(way, name, folder, sizes, steps, extra):
    """One process: {"seconds", "MiB", "update"}."""
    command = [sys.executable, __file__, "--run", way, name, folder, json.dumps(sizes), str(steps)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *extra], capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{way} {name} failed:\n{done.stderr[-2000:]}")
    update = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("UPDATE ")]
    return {**json.loads(found[0][7:]), "update": float(update[0]) if update else None}


def compare():
    try:
        import trl

        ways = ("ours", "trl")
        print(f"trl {trl.__version__}")
    except ImportError:
        ways = ("ours",)
        print("trl is not installed: ours alone")
    print("| model | script | beta | ours, s | TRL, s | ratio | ours, MiB | TRL, MiB | ratio |")
    print("|---" * 9 + "|")
    for size, (hidden, layers, vocab) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, hidden, layers, vocab, 64)
            for name, beta in RUNS:
                found = {way: [] for way in ways}
                if name == "ep_grpo":  # TRL has none
                    found = {"ours": []}
                for _ in range(3):
                    for way in found:
                        extra = ("--beta", str(beta), "--micro_batch_tokens", BUDGET[size])
                        found[way].append(measure(way, name, folder, BASE, STEPS[size], extra))
                cells = []
                for key, digits in ("seconds", 2), ("MiB", 0):
                    middle = []
                    for runs in found.values():
                        middle.append(statistics.median(run[key] for run in runs))
                    cells += [f"{value:.{digits}f}" for value in middle] + [""] * (2 - len(middle))
                    cells.append(f"{middle[0] / middle[1]:.2f}" if len(middle) == 2 else "")
                print(f"| {size} | {name} | {beta} | " + " | ".join(cells) + " |", flush=True)


def growth():
    import torch

    hidden, layers, vocab = SIZES["big"]
    print("| what | s/step | times the base | MiB | times the base |\n|---|---|---|---|---|")
    base = None
    cases = [
        ("base: P 8, G 8, T 48, V 32,768", BASE, vocab),
        ("G 16", {**BASE, "G": 16}, vocab),
        ("T 96", {**BASE, "T": 96}, vocab),
        ("V 65,536", BASE, 2 * vocab),
        ("P 16", {**BASE, "P": 16}, vocab),
    ]
    for label, sizes, V in cases:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, hidden, layers, V, 64)
            extra = ("--micro_batch_tokens", BUDGET["big"])
            found = measure("ours", "grpo", folder, sizes, STEPS["big"], extra)
            base = base or found
            cells = [label]
            for key, digits in ("seconds", 2), ("MiB", 0):
                cells += [f"{found[key]:.{digits}f}", f"{found[key] / base[key]:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)

    # Useful work of the update: 6 operations for each parameter and token in the layers, 6 V H in
    # the head, attention; the recomputed head product is not counted. Beside it, the time that a
    # plain matrix product needs for as many.
    width = BASE["T"] + 4
    tokens = BASE["P"] * BASE["G"] * width
    per_layer = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * 3 * hidden
    work = 6 * tokens * layers * per_layer + 12 * tokens * width * hidden * layers
    work += 6 * BASE["P"] * BASE["G"] * BASE["T"] * vocab * hidden
    a = torch.randn(1024, 1024)
    b = torch.randn(1024, 1024)
    times = []
    for _ in range(20):
        started = time.process_time()
        a @ b
        times.append(time.process_time() - started)
    rate = 2 * 1024**3 / statistics.median(times)
    print(f"\nupdate {base['update']:.2f} s for {work / 1e9:.0f} GFLOP; a plain product runs "
          f"{rate / 1e9:.0f} GFLOP/s: {work / rate / base['update']:.2f} of the limit")  # fmt: skip

    # Padding: rows sorted and trimmed to the longest of a micro-batch, beside rows as they come.
    lengths = torch.randint(1, 1025, (64,), generator=torch.Generator().manual_seed(0))
    rest = lengths.sort(descending=True).values
    columns = 0
    while len(rest):
        rows = max(1, 16_384 // int(rest[0]))
        columns += len(rest[:rows]) * int(rest[0])
        rest = rest[rows:]
    used = int(lengths.sum())
    plain = 64 * int(lengths.max())
    print(f"padding of 64 responses of 1 to 1,024 tokens: {1 - used / plain:.0%} as they come, "
          f"{1 - used / columns:.0%} sorted and trimmed")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        way, name, folder, sizes, steps = sys.argv[2:7]
        run = {"ours": run_ours, "trl": run_trl}[way]
        run(name, folder, json.loads(sizes), int(steps), sys.argv[7:])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--growth", action="store_true", help="double G, T, V and P")
        growth() if parser.parse_args().growth else compare()
