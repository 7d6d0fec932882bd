"""token_logps_and_entropies beside a float64 log-softmax of model(...).logits, each row alone and
without padding; and which models are refused because their logits are made in another way.
"""

import copy

import pytest
import torch
import transformers
from conftest import parse
from families import FAMILIES, GQA, SIZES, V, CutVocabulary, MaskedVocabulary
from families import TransformedHidden, make_model, perturb
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from common import BadInput, check_model, token_logps_and_entropies

B, S, T = 6, 40, 30  # 180 completion tokens


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks even for a small batch, the last one shorter."""
    monkeypatch.setitem(common.CHUNK_TOKENS, "cpu", 50)
    monkeypatch.setattr(common, "CHUNK_LOGITS", 0)


def make_batch():
    """Prompts of 10, 3, 1, ... tokens padded on the left, responses of 30, 29, ... on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (B, S), generator=generator)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate([(0, 0), (7, 0), (9, 1), (0, 29), (5, 12), (9, 29)]):
        mask[row, :left] = 0
        mask[row, S - right :] = 0
    weights = torch.randn(B, T, generator=generator) * mask[:, -T:]  # any loss: a weight per token
    return ids * mask, mask, weights


def exact(model, ids, mask, temperature=1.0):
    """(B, T) float64 log-probs and entropies, 0 at pads: no padding, batch, position ids, chunk."""
    rows = []
    for row, real in zip(ids, mask.bool()):
        logits = model(row[real][None]).logits[0, :-1].double()  # (tokens - 1, V)
        logq = (logits / temperature).log_softmax(-1)
        logps = logq.gather(-1, row[real][1:, None]).squeeze(-1)
        entropies = -(logq.exp() * logq).sum(-1)
        count = int(real[-T:].sum())
        pad = torch.zeros(T - count, dtype=torch.float64)
        rows.append([torch.cat([x[len(x) - count :], pad]) for x in (logps, entropies)])
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
        # The floor: a gradient that is 0 except for rounding, such as that of a key's bias.
        limit = tolerance * max(g.norm(), 1e-4 * scale)
        assert error <= limit, f"{name}: off by {error / g.norm():.1e}"


# --- values and gradients ---
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_float64(family, temperature):
    model = make_model(family)
    check_model(model, [], parse())
    ids, mask, weights = make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T, temperature)
    for x in (logps, entropies):
        assert x.shape == (B, T) and x.dtype == torch.float32
        assert x.isfinite().all()  # at pads too
    assert (entropies >= 0).all()
    assert logps.requires_grad and not entropies.requires_grad
    found = gradients(model, (logps * weights).sum())

    precise = copy.deepcopy(model).double()
    expected_logps, expected_entropies = exact(precise, ids, mask, temperature)
    expected = gradients(precise, (expected_logps * weights).sum())
    real = mask[:, -T:].bool()
    torch.testing.assert_close(logps[real].double(), expected_logps[real], atol=2e-5, rtol=0)
    torch.testing.assert_close(
        entropies[real].double(), expected_entropies[real], atol=2e-5, rtol=0)  # fmt: skip
    assert_close_gradients(found, expected, 2e-4)


# --- models that compute their logits in another way ---
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [TransformedHidden, MaskedVocabulary, CutVocabulary])
def test_a_family_that_makes_its_logits_otherwise_is_refused(family, dtype):
    """Fault: log-probs of another distribution than the model's, and nothing shows it."""
    torch.manual_seed(0)
    model = perturb(family(transformers.LlamaConfig(**GQA))).to(dtype)
    with pytest.raises(BadInput, match=f"^{family.__name__} computes its logits"):
        check_model(model, [], parse())


def test_modernbert_is_refused():
    """It transforms what its decoder returns, and calls the head its decoder."""
    sizes = {name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}
    config = transformers.ModernBertDecoderConfig(**sizes, cls_token_id=1, sep_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BadInput, match="^ModernBertDecoderForCausalLM cannot be used here: "):
        check_model(model, [], parse())


class ScaledHead(torch.nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


def test_a_head_that_is_more_than_a_product_is_refused():
    """Fault: what wraps the head, for example an adapter, is passed over."""
    model = make_model("llama")
    head = ScaledHead(32, V, bias=False)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    with pytest.raises(BadInput, match="computes its logits"):
        check_model(model, [], parse())


@pytest.mark.parametrize("family", ["llama", "gemma2, capped", "granite, scaled", "cohere, scaled"])
def test_bf16_models_are_not_refused_for_their_rounding(family):
    """Fault: a model scales and caps in bf16, we in float32; that difference is no other model."""
    check_model(make_model(family).bfloat16(), [], parse())


# --- padding ---
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2, dropout"])
def test_a_row_alone_and_among_others_agree(family, attention):
    """Fault: padding shifts positions or is attended to."""
    model = make_model(family, attn_implementation=attention)
    ids, mask, weights = make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T)
    for row in range(B):
        real = mask[row].bool()
        count = int(real[-T:].sum())
        alone = token_logps_and_entropies(model, ids[row, real][None], mask[row, real][None], count)
        torch.testing.assert_close(logps[row, :count], alone[0][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies[row, :count], alone[1][0], atol=1e-5, rtol=0)
    grads = gradients(model, (logps * weights).sum())
    assert all(g.isfinite().all() for g in grads.values())  # a pad attends to nothing: 0 / 0


def test_adding_pad_columns_changes_nothing():
    model = make_model()
    ids, mask, _ = make_batch()
    zeros = torch.zeros_like(ids[:, :20])
    wider = [torch.cat([zeros, x, zeros], 1) for x in (ids, mask)]
    before = token_logps_and_entropies(model, ids, mask, T)
    after = token_logps_and_entropies(model, *wider, T + 20)
    real = mask[:, -T:].bool()
    for narrow, wide in zip(before, after):
        torch.testing.assert_close(narrow[real], wide[:, :T][real], atol=1e-5, rtol=0)


# --- memory ---
class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operation returned, parameters aside."""

    def __init__(self, model):
        super().__init__()
        self.elements = 0
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                size = x.untyped_storage().nbytes() // x.element_size()
                self.elements = max(self.elements, size)
        return out


@pytest.mark.parametrize("family", ["qwen2, tied", "gemma2, capped", "phi, bias"])
def test_no_tensor_has_the_size_of_the_logits(family):
    """Fault: (B, T, V) logits fill the memory, in forward, in backward or kept between the two."""
    model = make_model(family, vocab_size=1499)
    ids = torch.randint(3, 1499, (16, 64))
    saved = []

    def keep(x):
        saved.append(x.shape)
        return x

    with LargestTensor(model) as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logps, _ = token_logps_and_entropies(model, ids, torch.ones_like(ids), 48)
        forward = largest.elements
        logps.sum().backward()
    assert 0 < forward <= largest.elements <= 16 * 48 * 1499 / 4  # a chunk has 50 of 768 tokens
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == 1499]


@pytest.mark.parametrize("family", ["llama", "phi, bias"])
def test_a_frozen_head_changes_no_other_gradient(family):
    model = make_model(family, hidden_size=128)
    ids, mask, weights = make_batch()

    def current():
        return gradients(model, (token_logps_and_entropies(model, ids, mask, T)[0] * weights).sum())

    every = current()
    in_head = {name: g for name, g in every.items() if name.startswith("lm_head")}
    assert in_head
    model.get_output_embeddings().requires_grad_(False)
    frozen = current()
    assert every.keys() - frozen.keys() == in_head.keys()
    assert_close_gradients(frozen, {name: every[name] for name in frozen}, 1e-6)

    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)  # the other way round
    assert_close_gradients(current(), in_head, 1e-6)


def test_a_frozen_head_gets_no_buffer_for_a_gradient():
    """Fault: with adapters the update still pays 1.2 GB for a gradient that nobody reads."""
    model = make_model(vocab_size=1499, hidden_size=512)  # the head: 767,488; a chunk: 74,950
    model.get_output_embeddings().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(3, 1499, (4, 48))
    with LargestTensor(model) as largest:
        token_logps_and_entropies(model, ids, torch.ones_like(ids), 40)[0].sum().backward()
    assert 0 < largest.elements < 1499 * 512


# --- the same bits ---
def test_scoring_and_frozen_models_build_no_graph_and_give_the_same_bits():
    """A ratio of exactly 1 and a KL of exactly 0 before the first update need the same bits."""
    model = make_model()
    ids, mask, _ = make_batch()
    logps, entropies = token_logps_and_entropies(model, ids, mask, T, 0.6)
    with torch.no_grad():
        scored = token_logps_and_entropies(model, ids, mask, T, 0.6)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for other in scored, token_logps_and_entropies(frozen, ids, mask, T, 0.6):
        assert torch.equal(other[0], logps) and torch.equal(other[1], entropies)
        assert not other[0].requires_grad and not other[1].requires_grad


@pytest.mark.parametrize("family", ["llama", "gemma2, capped", "lfm2"])
def test_recomputing_activations_changes_nothing(family):
    model = make_model(family)
    ids, mask, weights = make_batch()
    plain = token_logps_and_entropies(model, ids, mask, T)[0]
    expected = gradients(model, (plain * weights).sum())
    model.train()
    model.activation_checkpointing_enable()
    logps = token_logps_and_entropies(model, ids, mask, T)[0]
    assert torch.equal(logps, plain)
    assert_close_gradients(gradients(model, (logps * weights).sum()), expected, 1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_inputs_and_model_are_left_as_they_were(training):
    """Fault: a mode, a hook, a config or a buffer is changed and not restored."""
    model = make_model().train(training)
    ids, mask, weights = make_batch()
    inputs = ids.clone(), mask.clone()
    config = model.config.to_dict()
    state = copy.deepcopy(model.state_dict())
    check_model(model, [], parse())
    (token_logps_and_entropies(model, ids, mask, T, 0.6)[0] * weights).sum().backward()
    assert torch.equal(ids, inputs[0]) and torch.equal(mask, inputs[1])
    for module in model.modules():
        assert module.training == training
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert model.config.to_dict() == config and model.config.use_cache
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# --- bf16 ---
@pytest.mark.parametrize("family", ["llama", "granite, scaled", "gemma2, capped", "phi, bias"])
def test_bf16_weights(family):
    """Beside float64 on the same weights: values to 0.1, gradients to 5 %, which is bf16's own."""
    model = make_model(family).bfloat16()
    ids, mask, weights = make_batch()
    found = token_logps_and_entropies(model, ids, mask, T, 0.6)
    precise = copy.deepcopy(model).double()
    expected = exact(precise, ids, mask, 0.6)
    real = mask[:, -T:].bool()
    for x, y in zip(found, expected):
        assert x.dtype == torch.float32
        assert (x - y)[real].abs().max() < 0.1
    grads = gradients(model, (found[0] * weights).sum())
    assert all(g.dtype == torch.bfloat16 for g in grads.values())
    assert_close_gradients(grads, gradients(precise, (expected[0] * weights).sum()), 0.05)


def test_bf16_logits_are_kept_in_float32():
    """Fault: logits rounded to bf16 tie the top tokens: its steps are 0.125 between 16 and 32."""
    torch.manual_seed(0)
    hidden = torch.randn(50, 32).bfloat16()
    weight = (4 * torch.randn(V, 32)).bfloat16()
    bias = torch.randn(V).bfloat16()
    exact = hidden.double() @ weight.double().T + bias.double()
    logits = common.project(hidden, weight, bias, 1, None)
    assert logits.dtype == torch.float32
    assert exact.abs().max() > 32 and (logits - exact).abs().max() < 1e-4


def test_the_bf16_gradient_of_the_head_is_summed_over_chunks_in_float32():
    """140 chunks that all push the same way: added in bf16, the last ones would be rounded away."""
    model = make_model(num_hidden_layers=0).bfloat16()
    ids = torch.randint(3, V, (1, 8)).repeat(1000, 1)  # 7,000 tokens
    found = {}
    for rows in 1000, 1:
        logps, _ = token_logps_and_entropies(model, ids[:rows], torch.ones_like(ids[:rows]), 7)
        found[rows] = gradients(model, logps.sum())["lm_head.weight"].float()
    # The tolerance is three roundings of 2^-8.
    torch.testing.assert_close(found[1000] / 1000, found[1], rtol=0.012, atol=1e-4)
