"""Time of the rollout beside `model.generate`: the same prompts, the same number of tokens.

    OMP_NUM_THREADS=1 python tests/tools/bench_rollout.py

"small" is hidden 128, 4 layers, V 64; "big vocabulary" hidden 256, 6 layers, V 32,768: 8 prompts of
6 to 24 tokens, 8 samples each, exactly 48 tokens a sample (there is no stop token). Alternating
rounds of CPU time, the median. Machines differ, so look at the ratio.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "small": dict(
        vocab_size=64, hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    "big vocabulary": dict(
        vocab_size=32_768, hidden_size=256, num_hidden_layers=6, intermediate_size=768),
}  # fmt: skip
P, G, C, ROUNDS = 8, 8, 48, 5
ARGS = grpo.Args(max_new_tokens=C, temperature=1.0)


class Words:
    """Just enough of a tokenizer for rollout, without a stop token."""

    pad_token_id = 0
    eos_token_id = None
    chat_template = None

    def decode(self, ids, skip_special_tokens=True):
        return ""


def random_model(**sizes):
    torch.manual_seed(0)
    config = Qwen2Config(
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
        **sizes)  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), "
          f"{P} x {G} samples of {C} tokens\n")  # fmt: skip
    print("| model | generate, s | ours, s | ours / generate |\n|---|---|---|---|")
    for name, sizes in SIZES.items():
        model = random_model(**sizes)
        generator = torch.Generator().manual_seed(0)
        problems = []
        for i in range(P):
            ids = torch.randint(1, 64, (6 + 18 * i // P,), generator=generator)
            problems.append({"prompt_ids": ids.tolist()})
        ids, mask = grpo.pad_left(problems, 0, "cpu")

        def generate():
            out = model.generate(
                ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=C,
                num_return_sequences=G, pad_token_id=0)  # fmt: skip
            assert out.shape == (P * G, ids.shape[1] + C)

        def ours():
            streams = [grpo.random_stream(0, "draws", i) for i in range(P)]
            batch = grpo.rollout(model, Words(), problems, G, ARGS, streams)
            assert batch.mask.sum() == P * G * C

        times = {generate: [], ours: []}
        for number in range(ROUNDS + 1):
            for way in times:
                started = time.process_time()
                way()
                if number > 0:  # the first round warms up
                    times[way].append(time.process_time() - started)
        theirs = statistics.median(times[generate])
        mine = statistics.median(times[ours])
        print(f"| {name} | {theirs:.2f} | {mine:.2f} | {mine / theirs:.2f} |")


if __name__ == "__main__":
    main()
