"""Models: loading, the float32 optimizer, recomputed activations, adapters, saving, --steps 0."""

import ast
import gc
import json
import os
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from conftest import TINY, evaluation_lines, parse, run, training_lines
from peft.tuners.lora import LoraLayer
from tools import fake_memory
from transformers import Qwen2Config, Qwen2ForCausalLM

import common
import ep_grpo
import grpo
from common import BadInput, Float32AdamW, load_model, token_logps_and_entropies


def tiny_with(folder, **files):
    """A copy of the tiny model with other files; None removes one."""
    shutil.copytree(TINY, folder)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.unlink() if content is None else path.write_text(content)
    return str(folder)


def load_weights(folder):
    return common.load_file(Path(folder, "model.safetensors"))


def load_optimizer(folder):
    return torch.load(Path(folder, "optimizer.pt"), weights_only=True)


# --- loading ---
@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with a tiny GPT-2 whose dropouts are all set."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


def test_dropout_is_off_in_training_mode_too(gpt2):
    """Fault: dropout makes the ratio differ from 1 before the first update."""
    model, _ = load_model(gpt2, "cpu")
    model.train()
    ids = torch.arange(40).view(2, 20)
    ones = torch.ones_like(ids)
    first, second = [token_logps_and_entropies(model, ids, ones, 10)[0] for _ in range(2)]
    assert (first - second).exp().eq(1).all()
    plain = transformers.AutoModelForCausalLM.from_pretrained(gpt2).train()
    assert not torch.equal(plain(ids).logits, plain(ids).logits)  # without load_model it differs


def test_dropout_is_off_in_nested_configs_too(tmp_path):
    """Fault: a model whose text config is nested keeps its dropout."""
    text = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
        "attention_dropout": 0.5}  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4)  # fmt: skip
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    for file in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(TINY / file, tmp_path)
    model, _ = load_model(str(tmp_path), "cpu")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.train()(ids).logits)


def test_a_tokenizer_without_pad_falls_back_to_eos(monkeypatch):
    """Fault: no pad token crashes the first padded batch; or one that is there gets lost."""
    assert load_model(str(TINY), "cpu")[1].pad_token_id == 258
    without = transformers.AutoTokenizer.from_pretrained(TINY)
    without.pad_token = None
    monkeypatch.setattr(common.AutoTokenizer, "from_pretrained", lambda name: without)
    assert load_model(str(TINY), "cpu")[1].pad_token_id == 257


def test_a_tokenizer_without_pad_and_eos_is_one_sentence(monkeypatch):
    """Fault: neither a pad nor an eos token, and the rollout crashes on None."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.eos_token = None
    monkeypatch.setattr(common.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    with pytest.raises(BadInput, match="needs a pad or eos token"):
        load_model(str(TINY), "cpu")


def test_a_frozen_model_gets_no_gradients():
    """Fault: the reference model costs gradient memory."""
    frozen, _ = load_model(str(TINY), "cpu", trainable=False)
    trained, _ = load_model(str(TINY), "cpu")
    assert not any(weight.requires_grad for weight in frozen.parameters()) and not frozen.training
    assert all(weight.requires_grad for weight in trained.parameters())
    ids = torch.arange(20).view(2, 10)
    assert not token_logps_and_entropies(frozen, ids, torch.ones_like(ids), 5)[0].requires_grad


CONFIG = (TINY / "config.json").read_text()
BROKEN = {
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 1_000_000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "half a config": lambda folder: os.truncate(folder / "config.json", 50),
    "weights of another size": lambda folder: (folder / "config.json").write_text(
        CONFIG.replace('"vocab_size": 259', '"vocab_size": 300')),
    "not a language model": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "t5"}'),
    "half a tokenizer": lambda folder: os.truncate(folder / "tokenizer.json", 500),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_model_folder_is_one_sentence(tmp_path, broken):
    """Fault: a traceback out of the depths of a library."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    BROKEN[broken](folder)
    with pytest.raises(BadInput, match=rf"^cannot load the model {folder}.*: [^\n]+$"):
        load_model(str(folder), "cpu")


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model", "/no/such/folder", "a b\nc"])
def test_an_unknown_model_is_one_sentence(name):
    """Fault: a traceback for a slip in a name, or where there is no network."""
    with pytest.raises(BadInput, match="cannot load the model"):
        load_model(name, "cpu")


def test_an_error_without_a_message_is_named(monkeypatch):
    """Fault: the report of an error fails because the error says nothing."""
    def fails(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setattr(common.AutoConfig, "from_pretrained", fails)
    with pytest.raises(BadInput, match="ConnectionError"):
        load_model("some/model", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_one_sentence():
    """Fault: --device cuda on a machine without one ends in a traceback."""
    with pytest.raises(BadInput, match="--device cuda.*--device cpu"):
        load_model(str(TINY), "cuda")


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_an_unknown_device_is_one_sentence(device):
    """Fault: --device gpu is a traceback out of torch."""
    with pytest.raises(BadInput, match=f"--device {device}"):
        load_model(str(TINY), device)


def test_cudnn_attention_is_off():
    """Fault: it builds a plan for every new length, about 30 ms a token on an H100."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(str(TINY), "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- checks at the start ---
def test_a_response_longer_than_the_context_is_one_sentence(gpt2):
    """Fault: a position beyond the model's table is an IndexError, on a GPU a crash."""
    model, _ = load_model(gpt2, "cpu")
    problems = [{"prompt_ids": [1] * 10}]
    common.check_model(model, problems, grpo.Args(max_new_tokens=54))
    with pytest.raises(BadInput, match="context of 64"):
        common.check_model(model, problems, grpo.Args(max_new_tokens=55))


def test_a_context_that_grows_by_other_frequencies_is_the_original_one():
    """Fault: beyond it the longest row of a batch changes the log-probs of the others."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4,
        "rope_theta": 1e4}  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, pad_token_id=0, max_position_embeddings=128,
        original_max_position_embeddings=32, rope_parameters=rope)  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    problems = [{"prompt_ids": [1] * 10}]
    common.check_model(model, problems, grpo.Args(max_new_tokens=22))
    with pytest.raises(BadInput, match="context of 32"):
        common.check_model(model, problems, grpo.Args(max_new_tokens=23))


# --- the optimizer ---
def linear(*sizes, dtype=torch.bfloat16):
    model = torch.nn.Linear(*sizes, bias=False).to(dtype)
    model.weight.data.fill_(1.0)
    return model


def test_small_updates_survive_bf16():
    """Fault: bf16 weights of 1 swallow every update of 1e-5."""
    model = linear(1, 1)
    pure = linear(1, 1)
    ours = Float32AdamW(model, parse())
    theirs = torch.optim.AdamW(pure.parameters(), 1e-5, weight_decay=0)
    for _ in range(210):  # each step of Adam under an equal gradient is the learning rate
        for net in model, pure:
            net.weight.sum().backward()
        ours.step(1e-5)
        theirs.step()
        theirs.zero_grad()
    assert pure.weight.item() == 1
    (master,) = ours.masters
    assert master.dtype == torch.float32 and abs(master.item() - (1 - 210e-5)) < 1e-4
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == master.bfloat16().item() < 1


def test_gradients_of_micro_batches_are_summed_in_float32():
    """Fault: bf16 sums lose the small parts: 1 + 1/512 is 1."""
    model = linear(1, 1)
    optimizer = Float32AdamW(model, parse("--max_grad_norm", 100))
    for part in [1.0] + [1 / 512] * 8:
        (model.weight * part).sum().backward()
        assert model.weight.grad is None  # freed on the model's side
    assert optimizer.step(1e-6) == 1 + 8 / 512
    assert optimizer.grads == {}


def test_float32_weights_are_not_copied():
    """Fault: a second copy of the weights where none is needed."""
    model = linear(3, 3, dtype=torch.float32)
    assert Float32AdamW(model, parse()).masters[0].data_ptr() == model.weight.data_ptr()
    model = linear(3, 3)
    (master,) = Float32AdamW(model, parse()).masters
    assert master.data_ptr() != model.weight.data_ptr() and not master.requires_grad


def test_small_weights_share_a_bundle(monkeypatch):
    """Fault: a collective for each of a model's hundreds of small tensors."""
    sizes = [5, 300, 7, 200, 1000, 6]
    weights = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    weights.append(torch.nn.Parameter(torch.randn(4, 2).bfloat16()))
    weights.append(torch.nn.Parameter(torch.ones(())))
    model = torch.nn.ParameterList(weights)
    monkeypatch.setattr(common, "BUNDLE", 300)
    optimizer = Float32AdamW(model, parse("--max_grad_norm", 1e9))
    assert sorted(master.numel() for master in optimizer.masters) == [227, 300, 1000]
    before = [weight.detach().clone() for weight in weights]
    loss = sum((weight.float() * (i + 1)).sum() for i, weight in enumerate(weights[1:]))
    loss.backward()  # the first weight takes no part
    norm = optimizer.step(0.5)
    expected = sum((i + 1) ** 2 * w.numel() for i, w in enumerate(weights[1:])) ** 0.5
    assert norm == pytest.approx(expected, rel=1e-5)
    assert torch.equal(weights[0], before[0])
    for weight, old in zip(weights[1:], before[1:]):
        torch.testing.assert_close(weight, (old.float() - 0.5).to(old.dtype), rtol=1e-2, atol=1e-4)


def test_a_real_model_has_half_as_many_bundles_as_weights():
    """What docs/performance.md says of Qwen2.5-3B. No memory: the weights have shapes only."""
    config = Qwen2Config(**fake_memory.QWEN_3B)
    with torch.device("meta"):
        weights = list(Qwen2ForCausalLM(config).parameters())
    bundles = common.make_bundles(weights)
    assert (len(weights), len(bundles)) == (434, 218)
    assert sum(map(len, bundles)) == 434
    for bundle in bundles:
        assert len(bundle) == 1 or sum(weight.numel() for weight in bundle) <= common.BUNDLE


def test_the_state_of_another_model_is_refused():
    """Fault: a traceback, or weights that change places, with half of them overwritten."""
    saved = Float32AdamW(linear(4, 4), parse()).state_dict()
    model = linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(BadInput, match="another model or version"):
        Float32AdamW(model, parse()).load_state_dict(saved)
    assert torch.equal(model.weight, before)


def test_bundles_do_not_depend_on_the_precision():
    """Fault: a run that moves from a GPU to a CPU, where all is float32, mixes up its weights."""
    sizes = [3, 2, 5, 4]
    low = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in sizes]
    low[1] = torch.nn.Parameter(torch.zeros(2))  # such as the router of a mixture of experts
    high = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    found = [[[w.numel() for w in b] for b in common.make_bundles(ws)] for ws in (low, high)]
    assert found[0] == found[1] == [[2, 3, 4, 5]]


def snapshot(optimizer):
    """All tensors of an optimizer and of its model."""
    tensors = [*optimizer.weights, *optimizer.masters]
    for state in optimizer.adamw.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return [tensor.detach().clone() for tensor in tensors]


def unchanged(optimizer, before):
    return all(map(torch.equal, before, snapshot(optimizer)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_moves_nothing_and_forgets_its_gradients(dtype):
    """Fault: momentum moves the weights without a signal; or old gradients join the next step."""
    model = linear(2, 2, dtype=dtype)
    optimizer = Float32AdamW(model, parse("--max_grad_norm", 100))
    model.weight.sum().backward()
    assert optimizer.step(0.1) == 2
    before = snapshot(optimizer)
    (5 * model.weight.sum()).backward()
    assert optimizer.step(0.1, skip=True) == 0 and unchanged(optimizer, before)
    (model.weight * float("nan")).sum().backward()
    assert not optimizer.step(0.1) == optimizer.step(0.1, skip=True)  # NaN
    assert unchanged(optimizer, before)
    model.weight.sum().backward()
    assert optimizer.step(0.1) == 2 and not unchanged(optimizer, before)


def test_gradients_are_clipped_together():
    """Fault: each tensor is clipped alone, or the norm after clipping is logged."""
    model = torch.nn.Sequential(linear(2, 2), linear(2, 2)).float()
    optimizer = Float32AdamW(model, parse("--max_grad_norm", 0.5))
    (3 * model[0].weight + 4 * model[1].weight).sum().backward()
    assert abs(optimizer.step(0.0) - 10) < 1e-5  # (4 * 9 + 4 * 16) ** 0.5
    (moments,) = optimizer.adamw.state.values()
    first, second = moments["exp_avg"].split(4)
    torch.testing.assert_close(first, torch.full((4,), 0.1 * 3 / 20))
    torch.testing.assert_close(second, torch.full((4,), 0.1 * 4 / 20))


def test_a_weight_without_gradient_stays_what_it_is():
    """Fault: a weight that took no part is a crash, or moves."""
    model = torch.nn.ModuleDict({"used": linear(2, 2), "unused": linear(2, 2)})
    optimizer = Float32AdamW(model, parse())
    model["used"].weight.sum().backward()
    optimizer.step(0.1)
    assert (model["unused"].weight == 1).all() and (model["used"].weight < 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_with_another_learning_rate(dtype, tmp_path):
    """Fault: a resumed run keeps the learning rate of the saved state, or loses its moments."""
    states = []
    for broken in False, True:
        model = linear(2, 2, dtype=dtype)
        optimizer = Float32AdamW(model, parse("--learning_rate", 1e-3))
        for step in range(1, 5):
            if broken and step == 3:
                torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
                model = linear(2, 2, dtype=dtype)  # its weights come with the state
                optimizer = Float32AdamW(model, parse("--learning_rate", 1e-2))
                optimizer.load_state_dict(common.load_state(tmp_path))
                (tmp_path / "optimizer.pt").unlink()  # nothing stays mapped from it
            before = optimizer.masters[0].clone()
            (step * model.weight).square().sum().backward()
            learning_rate = 1e-3 if step < 3 else 1e-2
            optimizer.step(learning_rate)
            moved = (before - optimizer.masters[0]).mean().item() / learning_rate
            assert 0.9 < moved < 1.5  # of Adam under gradients that grow a little
        states.append(snapshot(optimizer))
    assert all(map(torch.equal, *states))


def test_a_bf16_run_resumes_with_its_float32_weights(data, tmp_path, monkeypatch):
    """Fault: a resumed bf16 run goes on from rounded weights. What a GPU does, on the CPU."""
    monkeypatch.setitem(common.DTYPES, "cpu", torch.bfloat16)
    flags = ["--gradient_checkpointing", "--beta", 0.04, "--learning_rate", 1e-5]
    flags += ["--save_every", 1, "--eval_problems", 1, "--eval_samples", 1, "--group_size", 3]
    run(data, tmp_path / "straight", *flags, "--steps", 3)
    run(data, tmp_path / "broken", *flags, "--steps", 2)
    run(data, tmp_path / "broken", *flags, "--steps", 3, "--resume")
    folders = [tmp_path / name / "checkpoint-3" for name in ("straight", "broken")]
    masters = [load_optimizer(folder)["masters"] for folder in folders]
    assert all(map(torch.equal, *masters))
    assert all(master.dtype == torch.float32 for master in masters[0])
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters[0])
    steps = training_lines(tmp_path / "straight")
    assert steps[0]["kl"] == 0
    assert all(line["clip_frac"] == 0 and line["grad_norm"] > 0 for line in steps)
    config = json.loads((tmp_path / "straight/checkpoint-3/config.json").read_text())
    assert config == json.loads(CONFIG) | {"dtype": "bfloat16"}  # neither dropout nor cache changed


# --- recomputed activations ---
def test_recomputing_activations_leaves_the_rollout_alone():
    """Fault: with it the cache is off in the rollout, and each token sees only itself."""
    texts = []
    for flag in "--gradient_checkpointing", "--no_gradient_checkpointing":
        args = parse(flag, "--max_new_tokens", 24)
        model, tokenizer = common.load_policy(args.model, args)
        prompts = common.encode_prompts(tokenizer, ["3+8+4=", "1+2="], args)
        problems = [{"prompt_ids": prompt} for prompt in prompts]
        streams = [torch.Generator().manual_seed(i) for i in range(2)]
        texts.append(grpo.rollout(model.train(), tokenizer, problems, 4, args, streams).texts)
    assert texts[0] == texts[1]


def test_recomputing_activations_happens_and_changes_no_gradient(data, tmp_path, monkeypatch):
    """Fault: gradient checkpointing is asked for and not on, or gives other weights."""
    forwards = []
    layer = transformers.models.qwen2.modeling_qwen2.Qwen2MLP

    def forward(self, x, real=layer.forward):
        forwards.append(torch.is_grad_enabled())
        return real(self, x)

    monkeypatch.setattr(layer, "forward", forward)
    weights = []
    counts = []
    for flag in "--gradient_checkpointing", "--no_gradient_checkpointing":
        forwards.clear()
        run(data, tmp_path / flag, flag, "--steps", 1)
        counts.append(sum(forwards))
        weights.append((tmp_path / flag / "checkpoint-1/model.safetensors").read_bytes())
    assert counts[0] > counts[1] and weights[0] == weights[1]


def test_the_noise_of_a_router_is_off(tmp_path):
    """Fault: recomputing asks for training mode, and with it comes all that training mode adds."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, head_dim=16, num_key_value_heads=1, num_local_experts=4,
        num_experts_per_tok=2, router_jitter_noise=0.5)  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    model, _ = common.load_policy(str(tmp_path), parse("--gradient_checkpointing"))
    ids = torch.arange(16).view(2, 8)
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def test_a_model_that_cannot_recompute_is_one_sentence(tmp_path):
    """Fault: the default flags end in a traceback."""
    config = transformers.CTRLConfig(vocab_size=300, n_embd=16, n_layer=1, n_head=2, dff=16)
    transformers.CTRLLMHeadModel(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="CTRLLMHeadModel .*--no_gradient_checkpointing"):
        common.load_policy(str(tmp_path), parse("--gradient_checkpointing"))


# --- saving ---
def test_tied_heads_stay_tied(tmp_path):
    """Fault: after a save and a load, or an update, head and embedding are two tensors."""
    model, tokenizer = load_model(str(TINY), "cpu")
    optimizer = Float32AdamW(model, parse())
    elements = sum(master.numel() for master in optimizer.masters)
    assert elements == sum({w.data_ptr(): w.numel() for w in model.parameters()}.values())
    ids = torch.arange(20).view(2, 10)
    token_logps_and_entropies(model, ids, torch.ones_like(ids), 5)[0].sum().backward()
    optimizer.step(0.1)
    common.save_model(model, tokenizer, tmp_path / "checkpoint-1")
    again, _ = load_model(str(tmp_path / "checkpoint-1"), "cpu")
    for net in model, again:
        assert net.get_output_embeddings().weight is net.get_input_embeddings().weight
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_the_saved_generation_config_is_the_models_own(tmp_path):
    """Fault: training overwrites how the model's makers sample from it, or odd settings crash."""
    odd = {"temperature": 0.1, "top_k": 5, "eos_token_id": [257, 77]}  # without do_sample
    folders = [TINY, tiny_with(tmp_path / "odd", generation_config__json=json.dumps(odd))]
    for number, folder in enumerate(folders, 1):
        model, tokenizer = load_model(str(folder), "cpu")
        common.save_model(model, tokenizer, tmp_path / f"checkpoint-{number}")
        settings = []
        for path in folder, tmp_path / f"checkpoint-{number}":
            saved = json.loads(Path(path, "generation_config.json").read_text())
            saved.pop("transformers_version", None)
            settings.append(saved)
        assert settings[0] == settings[1]


# --- what --steps 0 and a resume touch ---
@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of two steps with a reference model."""
    folder = tmp_path_factory.mktemp("trained")
    run(data, folder, "--steps", 2, "--beta", 0.04, "--eval_problems", 2)
    return folder


def storage_bytes(tensors):
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def alive(known):
    """The tensors of this process that are not among these, by id."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in known]


@pytest.mark.parametrize("script", [grpo, ep_grpo])
def test_steps_0_allocates_nothing_for_training(
        data, tmp_path, trained, monkeypatch, script):  # fmt: skip
    """Fault: an evaluation pays for float32 weights and a reference, and reads optimizer.pt."""
    copied = tmp_path / "run"
    shutil.copytree(trained, copied)
    size = (copied / "checkpoint-2/optimizer.pt").stat().st_size
    (copied / "checkpoint-2/optimizer.pt").write_bytes(bytes(size))  # an error, if it is read
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"script": script.__name__}))
    monkeypatch.setitem(common.DTYPES, "cpu", torch.bfloat16)
    gc.collect()
    known = {id(x) for x in gc.get_objects()}
    sizes = []

    def evaluate(model, *rest, real=script.evaluate):
        gc.collect()
        sizes.append((storage_bytes(alive(known)), storage_bytes(model.parameters())))
        return real(model, *rest)

    monkeypatch.setattr(script, "evaluate", evaluate)
    flags = ["--beta", 0.04, "--eval_problems", 1, "--eval_samples", 1, "--resume", "--steps", 0]
    run(data, copied, *flags, script=script)
    ((total, model),) = sizes
    assert model <= total < 1.1 * model
    assert "eval_reward" in evaluation_lines(copied)[-1]


FULL = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: 37 GB"
MAPPED = "unable to mmap 37 bytes from file <optimizer.pt>: Cannot allocate memory (12)"


@pytest.mark.parametrize("call", [1, 2], ids=["finding", "restoring"])
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(FULL), RuntimeError(MAPPED)],
    ids=["python", "torch", "mmap"])  # fmt: skip
def test_too_little_memory_for_the_state_is_no_broken_checkpoint(
        data, trained, tmp_path, monkeypatch, error, call):  # fmt: skip
    """Fault: a checkpoint that does not fit is skipped as broken, and the run's log is emptied."""
    copied = tmp_path / "run"
    shutil.copytree(trained, copied)
    before = {path: path.read_bytes() for path in copied.glob("*.json*")}
    calls = []

    def load(*given, real=torch.load, **more):
        calls.append(given)
        if len(calls) == call:
            raise error
        return real(*given, **more)

    monkeypatch.setattr(common.torch, "load", load)
    with pytest.raises(BadInput, match="^not enough memory to read .*optimizer.pt: ") as raised:
        run(data, copied, "--beta", 0.04, "--eval_problems", 2, "--resume", "--steps", 3)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in copied.glob("*.json*")} == before


# --- adapters ---
LORA = ["--lora_rank", 4, "--learning_rate", 1e-2, "--eval_problems", 4, "--eval_temperature", 0]


@pytest.fixture(scope="module")
def adapted(data, tmp_path_factory):
    """A run of three steps with adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    run(data, folder, *LORA, "--steps", 3)
    return folder


def layers(model):
    return {name: x for name, x in model.named_modules() if isinstance(x, LoraLayer)}


def test_adapters_stand_on_every_linear_layer_but_the_head():
    model, _ = load_model(str(TINY), "cpu", lora_rank=4)
    linears = {
        name.removesuffix(".base_layer") for name, x in model.named_modules()
        if isinstance(x, torch.nn.Linear) and "lora_" not in name and name != "lm_head"
    }
    assert layers(model).keys() == linears and len(linears) == 7 * 3
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
    for layer in layers(model).values():
        assert layer.r["default"] == 4 and layer.scaling["default"] == 2  # alpha = 2 R
        assert not layer.lora_B["default"].weight.any() and layer.lora_A["default"].weight.any()


def test_adapters_follow_from_the_seed():
    """Fault: each process of a run, or a run started again, draws other adapters."""
    drawn = []
    for seed in 0, 0, 1:
        torch.rand(3)
        model, _ = load_model(str(TINY), "cpu", lora_rank=4, seed=seed)
        drawn.append([layer.lora_A["default"].weight for layer in layers(model).values()])
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not any(map(torch.equal, drawn[0], drawn[2]))


@pytest.mark.parametrize("script", [grpo, ep_grpo])
def test_adapters_change_nothing_before_the_first_update(data, tmp_path, script):
    """Fault: fresh adapters move the policy, so the first ratio is not 1 or the first kl not 0."""
    lines = []
    for rank in 0, 4:
        flags = ["--lora_rank", rank, "--steps", 1, "--beta", 0.04]
        run(f"{data}/train.jsonl", tmp_path / str(rank), *flags, script=script)
        lines += training_lines(tmp_path / str(rank))
    for key in "reward", "completion_len", "entropy", "loss", "tokens":
        assert lines[1][key] == pytest.approx(lines[0][key], rel=1e-5, abs=1e-7)
    assert lines[1]["clip_frac"] == 0 and lines[1]["kl"] == 0
    assert lines[1]["grad_norm"] > 0


def test_adapters_train_and_the_base_keeps_its_bytes(data, tmp_path, monkeypatch):
    """Fault: the base moves too, for example because a save merges and unmerges it."""
    models = []

    def load_policy(*given, real=grpo.load_policy):
        models.append(real(*given)[0])
        return models[0], real(*given)[1]

    monkeypatch.setattr(grpo, "load_policy", load_policy)
    run(data, tmp_path, *LORA, "--steps", 2, "--save_every", 1)
    base = load_weights(TINY)
    for name, weight in models[0].named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")])
    moved = [layer.lora_B["default"].weight.any() for layer in layers(models[0]).values()]
    assert all(moved)


def test_the_reference_of_adapters_is_no_second_copy():
    """Fault: a frozen copy of the base doubles the memory."""
    args = parse("--lora_rank", 2, "--beta", 0.04)
    model, _ = common.load_policy(args.model, args)
    for layer in layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    reference = common.load_reference(model, args)
    assert len(layers(model)) == 21 and not layers(reference)
    plain, _ = load_model(str(TINY), "cpu")
    tensors = []
    for net in model, reference:
        tensors += [*net.parameters(), *net.buffers()]
    assert storage_bytes(tensors) <= 1.05 * storage_bytes(plain.parameters())
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(reference(ids).logits, plain(ids).logits)
        assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=0.1)
    assert reference.get_output_embeddings().weight is model.get_output_embeddings().weight


def test_the_optimizer_holds_only_adapters(adapted):
    """Fault: float32 weights and moments of the frozen base."""
    state = load_optimizer(adapted / "checkpoint-3")
    weights = common.load_file(adapted / "checkpoint-3/adapters/adapter_model.safetensors").values()
    elements = sum(weight.numel() for weight in weights)
    assert len(weights) == 2 * 21
    assert sum(master.numel() for master in state["masters"]) == elements
    assert sum(s["exp_avg"].numel() for s in state["adamw"]["state"].values()) == elements


def test_a_run_with_adapters_resumes_to_the_bit(data, adapted, tmp_path):
    """Fault: a resume draws new adapters, continues from the merged model, or merges twice."""
    run(data, tmp_path, *LORA, "--steps", 2)
    run(data, tmp_path, *LORA, "--steps", 3, "--resume")
    for name in "model.safetensors", "adapters/adapter_model.safetensors":
        files = [folder / "checkpoint-3" / name for folder in (adapted, tmp_path)]
        assert files[0].read_bytes() == files[1].read_bytes()
    masters = [load_optimizer(folder / "checkpoint-3")["masters"] for folder in (adapted, tmp_path)]
    assert all(map(torch.equal, *masters))
    assert (adapted / "eval-3.jsonl").read_bytes() == (tmp_path / "eval-3.jsonl").read_bytes()


@torch.no_grad()
def greedy(model, ids):
    """The tokens up to the eos."""
    out = model.generate(
        torch.tensor([ids]), do_sample=False, temperature=1.0, top_k=0, top_p=1.0,
        repetition_penalty=1.0, max_new_tokens=24)  # fmt: skip
    return out[0, len(ids) :]


def test_the_checkpoint_loads_without_peft_and_answers_alike(adapted, monkeypatch):
    """Fault: the folder holds names that only peft reads, or other weights than the run's."""
    folder = adapted / "checkpoint-3"
    assert not (folder / "adapter_config.json").exists()
    assert load_weights(folder).keys() == load_weights(TINY).keys()
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for line in (adapted / "eval-3.jsonl").read_text().splitlines():
        line = json.loads(line)
        tokens = greedy(merged, tokenizer(line["question"]).input_ids)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == line["samples"][0]


def test_the_merged_model_is_base_and_adapters(adapted):
    folder = str(adapted / "checkpoint-3")
    model, _ = load_model(folder, "cpu", trainable=False)
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder)
    base, _ = load_model(str(TINY), "cpu")
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
        assert (base(ids).logits - model(ids).logits).abs().max() > 0.01


def test_the_adapters_load_by_peft(adapted):
    folder = str(adapted / "checkpoint-3")
    ours, _ = load_model(folder, "cpu", trainable=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    theirs = peft.PeftModel.from_pretrained(base, f"{folder}/adapters").eval()
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_an_evaluation_uses_base_and_adapters_not_the_merged_model(data, adapted, tmp_path):
    """Fault: in bf16 the merged weights have lost most of a small change."""
    copied = tmp_path / "run"
    shutil.copytree(adapted, copied)
    expected = (copied / "eval-3.jsonl").read_bytes()
    (copied / "eval-3.jsonl").unlink()
    merged = load_weights(copied / "checkpoint-3")
    zeros = {name: torch.zeros_like(x) for name, x in merged.items()}
    common.save_file(zeros, copied / "checkpoint-3/model.safetensors", {"format": "pt"})
    run(data, copied, *LORA, "--resume", "--steps", 0)
    assert (copied / "eval-3.jsonl").read_bytes() == expected
    flags = ["--model", copied / "checkpoint-3", "--steps", 0, "--instruction", "", *LORA[-4:]]
    run(data, tmp_path / "other", *flags)
    assert (tmp_path / "other/eval-0.jsonl").read_bytes() == expected


@pytest.mark.parametrize("rank", [0, 8])
def test_adapters_of_another_rank_are_refused(data, adapted, tmp_path, rank):
    """Fault: a traceback about shapes, or the adapters are silently left out."""
    model = ["--model", adapted / "checkpoint-3", "--lora_rank", rank, "--steps", 4]
    with pytest.raises(BadInput, match="has rank 4: use --lora_rank 4$"):
        run(data, tmp_path, *model)
    with pytest.raises(BadInput, match="lora_rank.*4 -> "):
        run(data, adapted, *LORA, "--lora_rank", rank, "--steps", 4, "--resume")


def test_training_continues_from_the_adapters_of_another_run(data, adapted, tmp_path):
    """Fault: --model checkpoint starts from the base, or its reference does."""
    flags = [*LORA, "--model", adapted / "checkpoint-3", "--instruction", "", "--beta", 0.04]
    flags += ["--warmup_steps", 0, "--max_prompt_tokens", 32]
    run(data, tmp_path, *flags, "--steps", 1)
    (line,) = training_lines(tmp_path)
    assert line["kl"] == 0
    (first, _), (last, *_) = evaluation_lines(tmp_path), evaluation_lines(adapted)[::-1]
    assert first["eval_reward"] == last["eval_reward"]


def test_adapters_on_gpt2(data, gpt2, tmp_path):
    """Fault: its layers are no Linear but keep their weights transposed (Conv1D)."""
    flags = ["--model", gpt2, "--instruction", "", "--max_prompt_tokens", 32, "--warmup_steps", 0]
    run(data, tmp_path, *LORA, *flags, "--steps", 2, "--no_gradient_checkpointing", "--beta", 0.04)
    folder = str(tmp_path / "checkpoint-2")
    model, tokenizer = load_model(folder, "cpu", trainable=False)
    for layer in layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)  # whatever the run's rewards were
    assert len(layers(model)) == 2 * 4
    common.save_model(model, tokenizer, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base, _ = load_model(gpt2, "cpu")
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)
        assert (base(ids).logits - model(ids).logits).abs().max() > 0.01


def test_adapters_learn(tmp_path):
    """From 0.42 to 0.8 and more; measured with three seeds: 0.83 to 0.89 after 10 steps."""
    flags = ["--lora_rank", 8, "--learning_rate", 3e-3, "--steps", 12, "--output_dir", tmp_path]
    flags += ["--eval_every", 100, "--eval_problems", 100, "--eval_samples", 1, "--seed", 2]
    grpo.main(parse(*flags))
    before, after = [line["eval_accuracy"] for line in evaluation_lines(tmp_path)]
    assert before < 0.5 and after >= 0.8


# --- security ---
@pytest.mark.parametrize("path", sorted(common.ROOT.glob("*.py")), ids=lambda path: path.name)
def test_no_code_of_others_is_run(path):
    """Fault: pickles, remote code, eval or a shell run what came with a model or out of it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "pickle" not in ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        assert name not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
        assert not given.keys() & {"shell", "trust_remote_code"}, ast.unparse(node)
        if name == "torch.load":
            assert ast.unparse(given["weights_only"]) == "True"


def test_a_checkpoint_with_code_in_it_is_not_run(data, trained, tmp_path):
    """Fault: a crafted optimizer.pt runs code at a resume."""
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "boom",)

    copied = tmp_path / "run"
    shutil.copytree(trained, copied)
    folder = copied / "checkpoint-2"
    torch.save({"masters": [], "adamw": Bomb()}, folder / "optimizer.pt")
    whole = json.loads((folder / "whole.json").read_text())
    whole["sizes"]["optimizer.pt"] = (folder / "optimizer.pt").stat().st_size
    (folder / "whole.json").write_text(json.dumps(whole))
    assert common.find_checkpoint(copied, with_state=True) == (None, 0)
    assert not (tmp_path / "boom").exists()
