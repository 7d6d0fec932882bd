"""token_logps_and_entropies against a float64 log-softmax of model(...).logits, each row alone and without padding."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import common
from common import token_logps_and_entropies

V = 97  # a prime, so that no other size is a multiple of it
B, S, T = 6, 40, 30  # 180 completion tokens
TINY = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
GQA = {**TINY, "num_key_value_heads": 2}

FAMILIES = {  # name: (config class, its fields, whether hidden states and head can be taken apart)
    "qwen2 tied": ("Qwen2Config", {**GQA, "tie_word_embeddings": True}, True),
    "qwen3": ("Qwen3Config", {**GQA, "head_dim": 8}, True),
    "llama untied": ("LlamaConfig", {**GQA, "tie_word_embeddings": False}, True),
    "mistral": ("MistralConfig", {**GQA, "sliding_window": 8}, True),
    "gemma2 capped": ("Gemma2Config", {**GQA, "head_dim": 8, "final_logit_softcapping": 3.0}, True),
    "gemma3 text": ("Gemma3TextConfig", {**GQA, "head_dim": 8, "sliding_window": 8}, True),
    "granite scaled": ("GraniteConfig", {**GQA, "logits_scaling": 3.0}, True),
    "cohere scaled": ("CohereConfig", {**GQA, "logit_scale": 0.3}, True),
    "falcon-h1 scaled": ("FalconH1Config", {
        **GQA, "lm_head_multiplier": 0.3, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    }, True),
    "gpt2 dropout configured": ("GPT2Config", {
        "vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.1,
    }, True),
    "gpt-neox": ("GPTNeoXConfig", TINY, True),
    "phi head with bias": ("PhiConfig", GQA, True),
    "opt own positions": ("OPTConfig", {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 16}, True),
    "falcon": ("FalconConfig", {**TINY, "alibi": False}, True),
    "bloom alibi": ("BloomConfig", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, True),
    "minicpm3 scales before the head": ("MiniCPM3Config", {
        **TINY, "num_key_value_heads": 4, "dim_model_base": 8,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    }, False),
    "modernbert transforms before the head": ("ModernBertDecoderConfig", TINY, False),
}
MINICPM = "minicpm3 scales before the head"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(common.CHUNK_TOKENS, "cpu", 50)  # so that tiny batches have several, the last one shorter
    monkeypatch.setattr(common, "CHUNK_LOGITS", 0)


class PaddedVocabulary(transformers.LlamaForCausalLM):
    """A family nobody has heard of: its last seven ids can never be drawn."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.masked_fill(torch.arange(V, device=out.logits.device) >= V - 7, -torch.inf)
        return out


class CutVocabulary(transformers.LlamaForCausalLM):
    """Another one: its logits are fewer than its head has rows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[..., : V - 7]
        return out


UNHEARD_OF = {"unheard of": PaddedVocabulary, "unheard of, too": CutVocabulary}


def make(family="llama untied", **fields):
    torch.manual_seed(0)
    if family in UNHEARD_OF:
        model = UNHEARD_OF[family](transformers.LlamaConfig(**GQA))
    else:
        config, defaults, _ = FAMILIES[family]
        config = getattr(transformers, config)(**{**defaults, **fields})
        model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # random weights are small: biases would stay 0 and no cap would show
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def make_batch():
    """Prompts of 10, 3, 1, ... tokens padded on the left, completions of 30, 29, ... padded on the right, with id 0."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V - 7, (B, S), generator=generator)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate([(0, 0), (7, 0), (9, 1), (0, 29), (5, 12), (9, 29)]):
        mask[row, :left], mask[row, S - right :] = 0, 0
    weights = torch.randn(B, T, generator=generator) * mask[:, -T:]  # any loss: a weight per completion token
    return ids * mask, mask, weights


def reference(model, ids, mask, temperature=1.0):
    """(B, T) float64 log-probs and entropies, 0 at pads: no padding, no batch, no position ids, no chunk."""
    rows = []
    for row, real in zip(ids, mask.bool()):
        logq = (model(row[real][None]).logits[0, :-1].double() / temperature).log_softmax(-1)  # (tokens - 1, V)
        logps = logq.gather(-1, row[real][1:, None]).squeeze(-1)
        entropies = -torch.where(logq.isinf(), 0, logq.exp() * logq).sum(-1)
        count, length = int(real[-T:].sum()), int(real.sum())
        pad = torch.zeros(T - count, dtype=torch.float64)
        rows.append([torch.cat([x[length - 1 - count :], pad]) for x in (logps, entropies)])
    return tuple(torch.stack(x) for x in zip(*rows))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    scale = max(g.norm() for g in expected.values())
    for name, g in expected.items():
        error = (found[name].double() - g.double()).norm()
        # The floor: a gradient that is 0 but for rounding, as that of a key's bias.
        assert error <= tolerance * max(g.norm(), 1e-4 * scale), f"{name}: off by {error / g.norm():.1e}"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", [*FAMILIES, *UNHEARD_OF])
def test_values_and_gradients_equal_float64(family, temperature):
    model, (ids, mask, weights) = make(family), make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T, temperature)
    assert logps.shape == entropies.shape == (B, T) and logps.dtype == entropies.dtype == torch.float32
    assert logps.isfinite().all() and entropies.isfinite().all() and (entropies >= 0).all()  # at pads too
    assert logps.requires_grad and not entropies.requires_grad
    found = gradients(model, (logps * weights).sum())

    precise = copy.deepcopy(model).double()
    expected_logps, expected_entropies = reference(precise, ids, mask, temperature)
    expected = gradients(precise, (expected_logps * weights).sum())
    real = mask[:, -T:].bool()
    torch.testing.assert_close(logps[real].double(), expected_logps[real], atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies[real].double(), expected_entropies[real], atol=2e-5, rtol=0)
    assert_close_gradients(found, expected, 2e-4)


@pytest.mark.parametrize("family", [*FAMILIES, *UNHEARD_OF])
def test_which_models_take_the_slow_path(family):
    """Right either way, so only the number of times that the head runs as a module tells: never, or once a row."""
    model, (ids, mask, _) = make(family), make_batch()
    token_logps_and_entropies(model, ids, mask, T)  # finds out
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    token_logps_and_entropies(model, ids, mask, T)
    assert len(calls) == (0 if family in FAMILIES and FAMILIES[family][2] else B)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama untied", "gpt2 dropout configured", MINICPM])
def test_fault_3_alone_and_together_agree(family, attention):
    model, (ids, mask, weights) = make(family, attn_implementation=attention), make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T)
    for row in range(B):
        real = mask[row].bool()
        count = int(real[-T:].sum())
        alone = token_logps_and_entropies(model, ids[row : row + 1, real], mask[row : row + 1, real], count)
        torch.testing.assert_close(logps[row, :count], alone[0][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies[row, :count], alone[1][0], atol=1e-5, rtol=0)
    grads = gradients(model, (logps * weights).sum())
    assert all(g.isfinite().all() for g in grads.values())  # a pad attends to nothing: 0 / 0 if one is careless


def test_adding_pad_columns_changes_nothing():
    model, (ids, mask, _) = make(), make_batch()
    wider = [torch.cat([torch.zeros_like(x[:, :20]), x, torch.zeros_like(x[:, :20])], 1) for x in (ids, mask)]
    before, after = token_logps_and_entropies(model, ids, mask, T), token_logps_and_entropies(model, *wider, T + 20)
    for narrow, wide in zip(before, after):
        torch.testing.assert_close(narrow * mask[:, -T:], wide[:, :T] * mask[:, -T:], atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest block of memory that any operation returned, forward and backward, parameters aside."""

    def __init__(self, model):
        super().__init__()
        self.elements, self.known = 0, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("family", ["qwen2 tied", "gemma2 capped", "phi head with bias", MINICPM])
def test_fault_45_no_tensor_of_the_logits_size(family):
    model, logits_size, saved = make(family, vocab_size=1499), 16 * 48 * 1499, []
    ids = torch.randint(3, 1499, (16, 64))
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x)
    with LargestTensor(model) as largest:
        with keep:
            logps, _ = token_logps_and_entropies(model, ids, torch.ones_like(ids), 48)
        forward = largest.elements
        logps.sum().backward()
    assert 0 < forward <= largest.elements <= logits_size / 4  # of 768 tokens a chunk has 50, a row 64
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == 1499]  # nor are the chunks kept


@pytest.mark.parametrize("family", ["llama untied", "phi head with bias"])
def test_frozen_head_costs_nothing_and_changes_no_other_gradient(family):
    model, (ids, mask, weights) = make(family, hidden_size=128), make_batch()
    every = gradients(model, (token_logps_and_entropies(model, ids, mask, T)[0] * weights).sum())
    model.get_output_embeddings().requires_grad_(False)
    frozen = gradients(model, (token_logps_and_entropies(model, ids, mask, T)[0] * weights).sum())
    assert {name for name in every if name not in frozen} == {n for n in every if n.startswith("lm_head")}
    assert_close_gradients(frozen, {name: every[name] for name in frozen}, 1e-6)

    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)  # the other way round
    head = gradients(model, (token_logps_and_entropies(model, ids, mask, T)[0] * weights).sum())
    assert_close_gradients(head, {name: every[name] for name in every if name.startswith("lm_head")}, 1e-6)


def test_frozen_head_allocates_no_gradient_for_it():
    model = make(vocab_size=1499, hidden_size=512)  # the head has 767,488 elements, a chunk's logits 74,950
    model.get_output_embeddings().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(3, 1499, (4, 48))
    with LargestTensor(model) as largest:
        token_logps_and_entropies(model, ids, torch.ones_like(ids), 40)[0].sum().backward()
    assert 0 < largest.elements < 1499 * 512


@pytest.mark.parametrize("family", ["llama untied", MINICPM])
def test_scoring_and_frozen_models_build_no_graph_and_give_the_same_bits(family):
    """Ratio exactly 1 and KL exactly 0 before the first update (fault 11) need the same bits, not close ones."""
    model, (ids, mask, _) = make(family), make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T, 0.6)
    with torch.no_grad():
        scored = token_logps_and_entropies(model, ids, mask, T, 0.6)
    frozen = token_logps_and_entropies(copy.deepcopy(model).requires_grad_(False), ids, mask, T, 0.6)
    for other in (scored, frozen):
        assert torch.equal(other[0], logps) and torch.equal(other[1], entropies)
        assert not other[0].requires_grad and not other[1].requires_grad


@pytest.mark.parametrize("family", ["llama untied", "gemma2 capped", MINICPM])
def test_gradient_checkpointing_changes_nothing(family):
    model, (ids, mask, weights) = make(family), make_batch()
    plain = token_logps_and_entropies(model, ids, mask, T)[0]
    expected = gradients(model, (plain * weights).sum())
    model.train()
    model.gradient_checkpointing_enable()
    logps = token_logps_and_entropies(model, ids, mask, T)[0]
    assert torch.equal(logps, plain)
    assert_close_gradients(gradients(model, (logps * weights).sum()), expected, 1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", ["llama untied", MINICPM])
def test_inputs_and_model_are_left_as_they_were(family, training):
    model, (ids, mask, weights) = make(family).train(training), make_batch()
    inputs, config, state = (ids.clone(), mask.clone()), model.config.to_dict(), copy.deepcopy(model.state_dict())
    (token_logps_and_entropies(model, ids, mask, T, 0.6)[0] * weights).sum().backward()
    assert torch.equal(ids, inputs[0]) and torch.equal(mask, inputs[1])
    assert all(module.training == training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.to_dict() == config and model.config.use_cache
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_head_wrapped_after_the_first_call_is_still_right():
    """As an adapter does: its first call is equal to the bare head, later ones are not."""

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 3 * x.mean(-1, keepdim=True) * torch.arange(V) / V

    model, (ids, mask, _) = make(), make_batch()
    token_logps_and_entropies(model, ids, mask, T)
    bare, model.lm_head = model.lm_head, Adapter(32, V, bias=False)
    model.lm_head.load_state_dict(bare.state_dict())
    found = token_logps_and_entropies(model, ids, mask, T)[0]
    expected = reference(copy.deepcopy(model).double(), ids, mask)[0]
    torch.testing.assert_close((found * mask[:, -T:]).double(), expected * mask[:, -T:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama untied", "granite scaled", "gemma2 capped"])
def test_bf16_weights(family):
    """Beside float64 on the same bf16 weights: values to 0.1, gradients to 5 %, the rounding of bf16 itself."""
    model, (ids, mask, weights) = make(family).bfloat16(), make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T, 0.6)
    assert logps.dtype == entropies.dtype == torch.float32
    precise = copy.deepcopy(model).double()
    expected = reference(precise, ids, mask, 0.6)
    real = mask[:, -T:].bool()
    assert (logps - expected[0])[real].abs().max() < 0.1 and (entropies - expected[1])[real].abs().max() < 0.1
    found, exact = gradients(model, (logps * weights).sum()), gradients(precise, (expected[0] * weights).sum())
    assert all(g.dtype == torch.bfloat16 for g in found.values())
    assert_close_gradients(found, exact, 0.05)


def test_bf16_head_gradient_is_summed_over_chunks_in_float32():
    """140 chunks that all push the same way: added up in bf16 the last ones would be rounded away."""
    model = make(hidden_size=32, num_hidden_layers=0).bfloat16()
    ids = torch.randint(3, V, (1, 8)).repeat(1000, 1)  # 7,000 tokens
    logps, _ = token_logps_and_entropies(model, ids, torch.ones_like(ids), 7)
    many = gradients(model, logps.sum())["lm_head.weight"]
    logps, _ = token_logps_and_entropies(model, ids[:1], torch.ones_like(ids[:1]), 7)
    one = gradients(model, logps.sum())["lm_head.weight"]
    torch.testing.assert_close(many.float() / 1000, one.float(), rtol=0.012, atol=1e-4)  # three roundings of 2^-8
