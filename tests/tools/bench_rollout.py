"""Time of the rollout beside `model.generate`, on the same prompts, the same number of tokens, in alternating rounds.

    python tests/bench_rollout.py

"small" is hidden 128, 4 layers, V 64; "big vocabulary" hidden 256, 6 layers, V 32,768: 8 prompts of 6 to 24 tokens,
8 samples each, exactly 48 tokens a sample (no stop token exists). Ratios, since machines differ; run it on an idle one.
"""

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo

SIZES = {
    "small": dict(vocab_size=64, hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    "big vocabulary": dict(vocab_size=32_768, hidden_size=256, num_hidden_layers=6, intermediate_size=768),
}
P, G, C, ROUNDS = 8, 8, 48, 5
ARGS = SimpleNamespace(max_new_tokens=C, temperature=1.0)


class Words:
    """Just enough of a tokenizer for rollout, with no stop token: every sample runs to its full length."""

    pad_token_id, eos_token_id, chat_template = 0, None, None

    def decode(self, ids, skip_special_tokens=True):
        return ""


def random_model(**sizes):
    torch.manual_seed(0)
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None, **sizes)
    return Qwen2ForCausalLM(config).eval()


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {P} x {G} samples of {C} tokens")
    print("| model | generate, s | ours, s | ours / generate |\n|---|---|---|---|")
    for name, sizes in SIZES.items():
        model = random_model(**sizes)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(1, 64, (6 + 18 * i // P,), generator=generator).tolist() for i in range(P)]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

        def generate():
            out = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=C,
                                 num_return_sequences=G, pad_token_id=0)
            assert out.shape == (P * G, width + C)

        def ours():
            out = grpo.rollout(model, Words(), prompts, G, ARGS, torch.Generator().manual_seed(0))
            assert out[2].sum() == P * G * C

        times = {generate: [], ours: []}
        for round in range(ROUNDS + 1):
            for run in times:
                started = time.perf_counter()
                run()
                if round:  # the first round warms up
                    times[run].append(time.perf_counter() - started)
        theirs, mine = statistics.median(times[generate]), statistics.median(times[ours])
        print(f"| {name} | {theirs:.2f} | {mine:.2f} | {mine / theirs:.2f} |")


if __name__ == "__main__":
    main()
