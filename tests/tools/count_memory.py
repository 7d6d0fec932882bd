"""Bytes on a GPU, counted from the shapes: the tables of docs/performance.md.

    python tests/tools/count_memory.py            # the tables
    python tests/tools/count_memory.py --layer    # what one layer saves for backward, seen on CPU

Counted for 8 x 8 responses of 1,024 tokens after prompts of 512, all as long as allowed, and full
micro-batches. Nothing of it was measured on a GPU.
"""

import sys
from dataclasses import dataclass

ROWS = 64  # P G
COLUMNS = 1536  # prompt and response
MICRO_BATCH = 16_384  # --micro_batch_tokens
CHUNK = 1024  # tokens whose logits exist at once


@dataclass
class Shape:
    parameters: int
    linears: int  # parameters in the linear layers that get adapters
    adapters: int  # parameters of adapters of rank 32
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool  # the head is the embedding
    saved: int  # bytes per token that one layer saves for backward in bf16 (--layer)
    saved_adapters: int  # the same with adapters and frozen weights


QWEN_3B = Shape(
    3_085_938_688, 2_774_532_096, 59_867_136, 36, 2048, 11_008, 16, 2, 151_936, True, 137_928,
    130_184)
QWEN_7B = Shape(
    7_615_616_512, 6_525_288_448, 80_740_352, 28, 3584, 18_944, 28, 4, 152_064, False, 238_328,
    224_440)


def cache(m, rows):
    """Keys and values of all layers, bf16."""
    return rows * COLUMNS * m.layers * 2 * m.kv_heads * (m.hidden // m.heads) * 2


def sampling(m, rows):
    """Logits, scaled logits, probabilities and their sums, float32."""
    return 4 * rows * m.vocabulary * 4


def boundaries(m, tokens):
    return tokens * m.layers * m.hidden * 2


def layer_gradients(m, tokens):
    """Three gradients of the MLP's width exist at once, bf16."""
    return tokens * 3 * m.mlp * 2


def activations(m, tokens, saved):
    return boundaries(m, tokens) + tokens * saved + layer_gradients(m, tokens)


def waiting(m):
    """The tied head's bf16 gradient waits in autograd until the embedding's own arrives."""
    return 2 * m.vocabulary * m.hidden if m.tied else 0


def update(m, cards=1, reference=False, tokens=MICRO_BATCH):
    """Peak of the update on each card, all weights trained."""
    n = m.parameters
    held = 2 * n + 4 * n / cards + 8 * n / cards + 2 * n * reference + 4 * n  # with the gradients
    backward = held + activations(m, tokens, m.saved) + waiting(m)
    step = held + (4 * n / cards if cards > 1 else 0)  # the reduced shards of the gradients
    return max(backward, step)


def merged_layer(m):
    """One linear layer in float32: its base, the adapters' product and their sum."""
    return 3 * 4 * m.hidden * m.mlp


def adapters(m, phase, tokens=MICRO_BATCH, rows=ROWS):
    """Peak of a phase with adapters of rank 32 on one card."""
    a = m.adapters
    held = 2 * m.parameters + 2 * a + 4 * a + 8 * a
    return held + {
        "rollout": cache(m, rows) + sampling(m, rows),
        "update": 4 * a + activations(m, tokens, m.saved_adapters),
        "evaluation": cache(m, 4 * rows) + sampling(m, 4 * rows),
        "checkpoint": merged_layer(m),
    }[phase]


def gb(count):
    return f"{count / 1e9:.1f}"


def table(header, rows):
    lines = [header, "---|" * len(header), *rows]
    lines = [line if isinstance(line, str) else " | ".join(line) + " |" for line in lines]
    return "\n".join("|" + line if line.startswith("---") else "| " + line for line in lines)


def one_card():
    m = QWEN_3B
    n = m.parameters
    held = 14 * n
    tokens = f"{MICRO_BATCH:,} × "
    head = m.vocabulary * m.hidden
    return table(["what", "count", "GB"], [
        ["weights, bf16", "2 per parameter", gb(2 * n)],
        ["float32 weights of the optimizer", "4 per parameter", gb(4 * n)],
        ["Adam's two moments, float32", "8 per parameter", gb(8 * n)],
        ["**always**", "", f"**{gb(held)}**"],
        ["reference, bf16: only in ep_grpo.py, or with `--beta` above 0", "2 per parameter",
         gb(2 * n)],
        ["update: gradients, float32", "4 per parameter", gb(4 * n)],
        ["update: inputs of the layers", f"{tokens}{m.layers} × {m.hidden:,} × 2",
         gb(boundaries(m, MICRO_BATCH))],
        ["update: one layer recomputed", f"{tokens}{m.saved:,}", gb(MICRO_BATCH * m.saved)],
        ["update: gradients inside this layer", f"{tokens}3 × {m.mlp:,} × 2",
         gb(layer_gradients(m, MICRO_BATCH))],
        ["update: gradient of the tied head, waiting for the embedding's",
         f"{m.vocabulary:,} × {m.hidden:,} × 2", gb(waiting(m))],
        ["**peak of the update**, without a reference", "", f"**{gb(update(m))}**"],
        ["**peak of the update**, with a reference", "", f"**{gb(update(m, reference=True))}**"],
        ["head, before any layer: its gradient, float32", f"{m.vocabulary:,} × {m.hidden:,} × 4",
         gb(4 * head)],
        ["head: one product to be added to it, bf16", f"{m.vocabulary:,} × {m.hidden:,} × 2",
         gb(2 * head)],
        ["head: one chunk of logits, float32", f"{CHUNK:,} × {m.vocabulary:,} × 4",
         gb(4 * CHUNK * m.vocabulary)],
        ["head: their gradient, bf16", f"{CHUNK:,} × {m.vocabulary:,} × 2",
         gb(2 * CHUNK * m.vocabulary)],
        ["rollout: cache", f"{ROWS} × {COLUMNS:,} × {cache(m, 1) // COLUMNS:,}",
         gb(cache(m, ROWS))],
        ["rollout: sampling, float32", f"4 × {ROWS} × {m.vocabulary:,} × 4",
         gb(sampling(m, ROWS))],
        ["**peak of the rollout**, without a reference", "",
         f"**{gb(held + cache(m, ROWS) + sampling(m, ROWS))}**"],
        ["evaluation: cache, four times the rows",
         f"{4 * ROWS} × {COLUMNS:,} × {cache(m, 1) // COLUMNS:,}", gb(cache(m, 4 * ROWS))],
        ["evaluation: sampling, float32", f"4 × {4 * ROWS} × {m.vocabulary:,} × 4",
         gb(sampling(m, 4 * ROWS))],
        ["**peak of an evaluation**, without a reference", "",
         f"**{gb(held + cache(m, 4 * ROWS) + sampling(m, 4 * ROWS))}**"],
    ])  # fmt: skip


def fits(count):
    """On an "80 GB" card, which has 85.0e9 bytes: CUDA, NCCL and fragments need some of them."""
    return "yes" if count < 75e9 else "tight" if count < 80e9 else "no"


def cards():
    header = ["model", "cards", "GB without reference", "fits", "GB with reference", "fits"]
    rows = []
    for name, m in ("3B", QWEN_3B), ("7B", QWEN_7B):
        for count in (1, 2, 4, 8):
            plain = update(m, count)
            both = update(m, count, reference=True)
            rows.append([name, str(count), f"{plain / 1e9:.0f}", fits(plain), f"{both / 1e9:.0f}",
                         fits(both)])
    return table(header, rows)


def adapters_3b():
    m = QWEN_3B
    a = m.adapters
    tokens = f"{MICRO_BATCH:,} × "
    return table(["what", "count", "GB"], [
        ["base weights, bf16, frozen", f"{m.parameters:,} × 2", gb(2 * m.parameters)],
        ["adapters, bf16", f"{a:,} × 2", gb(2 * a)],
        ["float32 adapters of the optimizer", f"{a:,} × 4", gb(4 * a)],
        ["Adam's two moments, float32", f"{a:,} × 8", gb(8 * a)],
        ["reference: shares the base weights", "", "0"],
        ["update: gradients of the adapters, float32", f"{a:,} × 4", gb(4 * a)],
        ["update: inputs of the layers", f"{tokens}{m.layers} × {m.hidden:,} × 2",
         gb(boundaries(m, MICRO_BATCH))],
        ["update: one layer recomputed", f"{tokens}{m.saved_adapters:,}",
         gb(MICRO_BATCH * m.saved_adapters)],
        ["update: gradients inside this layer", f"{tokens}3 × {m.mlp:,} × 2",
         gb(layer_gradients(m, MICRO_BATCH))],
        ["**peak of the update**", "", f"**{gb(adapters(m, 'update'))}**"],
        ["rollout: cache", f"{ROWS} × {COLUMNS:,} × {cache(m, 1) // COLUMNS:,}",
         gb(cache(m, ROWS))],
        ["rollout: sampling, float32", f"4 × {ROWS} × {m.vocabulary:,} × 4",
         gb(sampling(m, ROWS))],
        ["**peak of the rollout**", "", f"**{gb(adapters(m, 'rollout'))}**"],
        ["evaluation: cache, four times the rows",
         f"{4 * ROWS} × {COLUMNS:,} × {cache(m, 1) // COLUMNS:,}", gb(cache(m, 4 * ROWS))],
        ["evaluation: sampling, float32", f"4 × {4 * ROWS} × {m.vocabulary:,} × 4",
         gb(sampling(m, 4 * ROWS))],
        ["**peak of an evaluation**", "", f"**{gb(adapters(m, 'evaluation'))}**"],
        ["checkpoint: one layer merged, float32", f"3 × {m.hidden:,} × {m.mlp:,} × 4",
         gb(merged_layer(m))],
        ["**peak of a checkpoint**", "", f"**{gb(adapters(m, 'checkpoint'))}**"],
    ])  # fmt: skip


def adapters_micro_batch():
    rows = []
    for tokens in (4096, 8192, 16_384, 32_768):
        peaks = [gb(adapters(m, "update", tokens)) for m in (QWEN_3B, QWEN_7B)]
        rows.append([f"{tokens:,}", *peaks])
    return table(["`--micro_batch_tokens`", "update, 3B, GB", "update, 7B, GB"], rows)


def adapters_phases():
    rows = []
    for phase in ("rollout", "update", "evaluation", "checkpoint"):
        rows.append([phase, *(gb(adapters(m, phase)) for m in (QWEN_3B, QWEN_7B))])
    return table(["phase", "3B, GB", "7B, GB"], rows)


def disk():
    rows = []
    for name, m in ("3B", QWEN_3B), ("7B", QWEN_7B):
        full = 14 * m.parameters
        small = 4 * m.linears + 2 * (m.parameters - m.linears) + 14 * m.adapters
        rows.append([name, "all weights", gb(full), gb(3 * full)])
        rows.append([name, "`--lora_rank 32`", gb(small), gb(3 * small)])
    return table(["model", "trained", "GB per checkpoint", "GB while the third is written"], rows)


def tables():
    """{name: text} of the counted tables of docs/performance.md."""
    return {
        "one card": one_card(), "cards": cards(), "adapters": adapters_3b(),
        "adapters micro-batch": adapters_micro_batch(), "adapters phases": adapters_phases(),
        "disk": disk()}


def saved_per_token(m, rank, tokens=64):
    """Bytes per token that one decoder layer saves for backward, bf16, with a padding mask."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=m.hidden, intermediate_size=m.mlp, num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads, num_hidden_layers=1, vocab_size=64)
    model = Qwen2ForCausalLM(config).bfloat16()
    if rank > 0:
        import peft

        adapter = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        peft.inject_adapter_in_model(adapter, model)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    known.add(mask.untyped_storage().data_ptr())
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # kept, so that its address is not used again
        return tensor

    hidden = torch.randn(1, tokens, m.hidden, dtype=torch.bfloat16, requires_grad=True)
    rope = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.layers[0](hidden, position_embeddings=rope, attention_mask=mask)
    return sum(storage.nbytes() for storage in saved.values()) / tokens


if __name__ == "__main__":
    if "--layer" in sys.argv:
        for name, m in ("3B", QWEN_3B), ("7B", QWEN_7B):
            print(name, saved_per_token(m, 0), saved_per_token(m, 32))
    else:
        for name, text in tables().items():
            print(f"{name}\n\n{text}\n")
