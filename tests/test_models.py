"""Models: dropout, pad token, float32 masters, gradient checkpointing, tied heads, saving (FAULTS 11, 16, 21, 37)."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import common
import grpo
from common import BadInput, copy_masters, float32_masters, load_model, save_checkpoint, token_logps_and_entropies

TINY = Path(grpo.TINY_DIR)
SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_problems 2".split()


def run(data, folder, *flags):
    grpo.main(grpo.parse_args([*SMALL, "--dataset", data, "--output_dir", str(folder), *map(str, flags)]))


def tiny_with(folder, **files):
    """A copy of the tiny model with other files; None removes one."""
    shutil.copytree(TINY, folder)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.unlink() if content is None else path.write_text(content)
    return str(folder)


# --- loading ---


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with a tiny GPT-2 whose dropouts are all set."""
    folder = tmp_path_factory.mktemp("gpt2")
    drops = {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5}
    config = transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, **drops)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


def test_11_dropout_is_off_in_train_mode_too(gpt2):
    """Fault: dropout makes the ratio differ from 1 before the first update."""
    model, _ = load_model(gpt2, "cpu")
    model.train()
    ids = torch.arange(40).view(2, 20)
    (first, _), (second, _) = (token_logps_and_entropies(model, ids, torch.ones_like(ids), 10) for _ in range(2))
    assert (first - second).exp().eq(1).all()
    plain = transformers.AutoModelForCausalLM.from_pretrained(gpt2).train()  # and without load_model it would differ
    assert not torch.equal(plain(ids).logits, plain(ids).logits)


def test_42_pad_token_falls_back_to_eos(monkeypatch):
    """Fault: a tokenizer without a pad token crashes the first padded batch; one that has its own loses it."""
    assert load_model(str(TINY), "cpu")[1].pad_token_id == 258
    without = transformers.AutoTokenizer.from_pretrained(TINY)
    without.pad_token = None
    monkeypatch.setattr(common.AutoTokenizer, "from_pretrained", lambda name: without)
    assert load_model(str(TINY), "cpu")[1].pad_token_id == 257


def test_a_frozen_model_gets_no_gradients():
    """Fault: the reference model costs gradient memory."""
    frozen, trained = (load_model(str(TINY), "cpu", trainable)[0] for trainable in (False, True))
    assert not any(weight.requires_grad for weight in frozen.parameters()) and not frozen.training
    assert all(weight.requires_grad for weight in trained.parameters())
    ids = torch.arange(20).view(2, 10)
    assert not token_logps_and_entropies(frozen, ids, torch.ones_like(ids), 5)[0].requires_grad


BROKEN = {
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 1_000_000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "half a config": lambda folder: os.truncate(folder / "config.json", 50),
    "weights of another size": lambda folder: (folder / "config.json").write_text(
        (TINY / "config.json").read_text().replace('"vocab_size": 259', '"vocab_size": 300')
    ),
    "not a language model": lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'),
    "half a tokenizer": lambda folder: os.truncate(folder / "tokenizer.json", 500),
}


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


# --- float32 masters ---


def test_16_small_updates_survive_bf16_weights():
    """Fault: pure bf16 weights of 1 swallow every update of 1e-6."""
    model, pure = (torch.nn.Linear(1, 1, bias=False).bfloat16() for _ in range(2))
    for net in model, pure:
        net.weight.data.fill_(1.0)
    (master,) = masters = float32_masters(model)
    optimizers = [torch.optim.SGD(weights, lr=1e-6) for weights in (masters, pure.parameters())]
    for _ in range(2100):
        for net, optimizer in zip((model, pure), optimizers):
            net.weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        copy_masters(masters, model)
    assert pure.weight.item() == 1
    assert master.dtype == torch.float32 and abs(master.item() - (1 - 2100e-6)) < 1e-4
    assert model.weight.dtype == torch.bfloat16 and model.weight.item() == master.bfloat16().item() < 1


def test_16_gradients_of_micro_batches_are_summed_in_float32():
    """Fault: bf16 sums lose the small parts: 1 + 1/512 is 1."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    (master,) = float32_masters(model)
    for part in [1.0] + [1 / 512] * 8:
        (model.weight * part).sum().backward()
        assert model.weight.grad is None  # freed on the model's side
    assert master.grad.item() == 1 + 8 / 512


def test_16_masters_of_float32_weights_cost_nothing():
    """Fault: a second copy of the weights where none is needed."""
    model = torch.nn.Linear(3, 3)
    for master, weight in zip(float32_masters(model), model.parameters()):
        assert master.data_ptr() == weight.data_ptr()
    for master, weight in zip(float32_masters(model.bfloat16()), model.parameters()):
        assert master.data_ptr() != weight.data_ptr() and not master.requires_grad


def test_38_bf16_run_resumes_with_its_float32_masters(data, tmp_path, monkeypatch):
    """Fault: a resumed bf16 run goes on from rounded weights; gradient checkpointing changes the rollout, turns the
    cache off or leaks into the saved config. What a GPU does, on the CPU."""
    monkeypatch.setitem(common.DTYPES, "cpu", torch.bfloat16)
    flags = ["--gradient_checkpointing", "--beta", "0.04", "--learning_rate", "1e-5", "--save_every", 1]
    run(data, tmp_path / "straight", *flags, "--steps", 3)
    run(data, tmp_path / "broken", *flags, "--steps", 2)
    run(data, tmp_path / "broken", *flags, "--steps", 3, "--resume")
    states = [
        torch.load(tmp_path / name / "checkpoint-3/optimizer.pt", weights_only=True) for name in ("straight", "broken")
    ]
    assert all(master.dtype == torch.float32 for master in states[0]["masters"])
    assert all(map(torch.equal, states[0]["masters"], states[1]["masters"]))
    assert any(not torch.equal(master, master.bfloat16().float()) for master in states[0]["masters"])
    log = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    assert steps[0]["kl"] == 0 and all(line["clip_frac"] == 0 and line["grad_norm"] > 0 for line in steps)
    config = json.loads((tmp_path / "straight/checkpoint-3/config.json").read_text())
    assert config == json.loads((TINY / "config.json").read_text()) | {"dtype": "bfloat16"}


# --- gradient checkpointing ---


def test_21_gradient_checkpointing_leaves_the_rollout_alone(monkeypatch):
    """Fault: with gradient checkpointing the cache is off in the rollout, and each token sees only itself."""
    samples = []
    for checkpointing in (False, True):
        model, tokenizer = load_model(str(TINY), "cpu")
        if checkpointing:
            common.recompute_activations(model)
        prompts = [common.encode_prompt(tokenizer, question) for question in ("3+8+4=", "1+2=")]
        args = grpo.parse_args(["--max_new_tokens", "24"])
        samples.append(grpo.rollout(model, tokenizer, prompts, 4, args, torch.Generator().manual_seed(0))[-1])
    assert samples[0] == samples[1]


def test_21_gradient_checkpointing_recomputes_and_changes_no_gradient(data, tmp_path, monkeypatch):
    """Fault: gradient checkpointing is asked for and not on, or gives other weights."""
    forwards = []
    layer = transformers.models.qwen2.modeling_qwen2.Qwen2MLP
    real = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x: forwards.append(torch.is_grad_enabled()) or real(self, x))
    weights, counts = [], []
    for flag in ["--gradient_checkpointing", "--no_gradient_checkpointing"]:
        forwards.clear()
        run(data, tmp_path / flag, flag, "--steps", 1)
        counts.append(sum(forwards))
        weights.append((tmp_path / flag / "checkpoint-1/model.safetensors").read_bytes())
    assert counts[0] > counts[1] and weights[0] == weights[1]


# --- saving ---


def test_37_tied_heads_stay_tied(tmp_path):
    """Fault: after a save and a load, or an update of the masters, the head and the embedding are two tensors."""
    model, tokenizer = load_model(str(TINY), "cpu")
    masters = float32_masters(model)
    assert len(masters) == len({weight.data_ptr() for weight in model.parameters()})
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    ids = torch.arange(20).view(2, 10)
    token_logps_and_entropies(model, ids, torch.ones_like(ids), 5)[0].sum().backward()
    optimizer.step()
    copy_masters(masters, model)
    save_checkpoint(tmp_path, 1, model, tokenizer, masters, optimizer)
    again, _ = load_model(str(tmp_path / "checkpoint-1"), "cpu")
    for net in model, again:
        assert net.get_output_embeddings().weight is net.get_input_embeddings().weight
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_18_the_saved_generation_config_is_the_models_own(tmp_path):
    """Fault: training overwrites how the model's makers sample from it, or an odd one cannot be saved."""
    odd = {"temperature": 0.1, "top_k": 5, "eos_token_id": [257, 77]}  # without do_sample: a warning to transformers
    folders = [str(TINY), tiny_with(tmp_path / "odd", generation_config__json=json.dumps(odd))]
    for number, folder in enumerate(folders, 1):
        model, tokenizer = load_model(folder, "cpu")
        optimizer = torch.optim.AdamW(float32_masters(model))
        save_checkpoint(tmp_path, number, model, tokenizer, [], optimizer)
        before, after = (
            json.loads((Path(path) / "generation_config.json").read_text())
            for path in (folder, tmp_path / f"checkpoint-{number}")
        )
        before.pop("transformers_version", None), after.pop("transformers_version")
        assert before == after


# --- security ---


@pytest.mark.parametrize("path", sorted(Path(grpo.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_32_no_code_of_others_is_run(path):
    """Fault: pickles, remote code, eval or a shell run what came with a model or out of it."""
    source = path.read_text()
    assert "trust_remote_code" not in source and "pickle" not in source
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        assert name not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), ast.unparse(node)
        assert "shell" not in given, ast.unparse(node)
        if name == "torch.load":
            assert ast.unparse(given["weights_only"]) == "True"


def test_32_a_checkpoint_with_code_in_it_is_not_run(data, tmp_path):
    """Fault: a crafted optimizer.pt runs code at a resume."""
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "boom",)

    run(data, tmp_path / "run", "--steps", 1)
    folder = tmp_path / "run/checkpoint-1"
    torch.save({"masters": [], "optimizer": Bomb()}, folder / "optimizer.pt")
    whole = json.loads((folder / "whole.json").read_text())
    whole["sizes"]["optimizer.pt"] = (folder / "optimizer.pt").stat().st_size
    (folder / "whole.json").write_text(json.dumps(whole))
    assert common.load_checkpoint(tmp_path / "run") == (None, 0, None)
    assert not (tmp_path / "boom").exists()


def test_11_dropout_is_off_in_nested_configs_too(tmp_path):
    """Fault: a model whose text config is nested keeps its dropout, and training mode for checkpointing runs it."""
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.5}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(grpo.TINY_DIR, file), tmp_path)
    model, _ = load_model(str(tmp_path), "cpu")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.train()(ids).logits)


def test_11_the_noise_of_a_router_stays_off_when_activations_are_recomputed():
    """Fault: gradient checkpointing asks for training mode, and with it comes all that training mode adds."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.5)  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    ids, forwards = torch.arange(16).view(2, 8), []
    expected = model(ids).logits
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    common.recompute_activations(model)
    logits = model(ids, use_cache=False).logits
    logits.sum().backward()
    assert torch.equal(logits, expected) and len(forwards) == 2  # once more in backward


def test_a_model_that_cannot_recompute_is_one_sentence():
    """Fault: the default flags end in a traceback."""
    config = transformers.CTRLConfig(vocab_size=300, n_embd=16, n_layer=1, n_head=2, dff=16)
    model = transformers.CTRLLMHeadModel(config)
    with pytest.raises(BadInput, match="--no_gradient_checkpointing"):
        common.recompute_activations(model)


def test_a_response_longer_than_the_context_is_one_sentence(gpt2):
    """Fault: a position beyond the model's table is an IndexError, on a GPU a crash of the device."""
    model, _ = load_model(gpt2, "cpu")
    context = model.config.n_positions
    problems = [{"prompt_ids": [1] * 10}]
    common.check_model(model, problems, grpo.Args(max_new_tokens=context - 10))
    with pytest.raises(BadInput, match="context"):
        common.check_model(model, problems, grpo.Args(max_new_tokens=context - 9))


def test_1_a_context_that_grows_by_other_frequencies_is_the_original_one():
    """Fault: beyond it a batch's longest row changes the others' log-probs, so micro-batches change the result."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "rope_theta": 1e4}
    config = transformers.Phi3Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0,
        max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope)  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    common.check_model(model, [{"prompt_ids": [1] * 10}], grpo.Args(max_new_tokens=22))
    with pytest.raises(BadInput, match="context of 32"):
        common.check_model(model, [{"prompt_ids": [1] * 10}], grpo.Args(max_new_tokens=23))


def test_an_unknown_device_is_one_sentence():
    """Fault: --device gpu is a traceback out of torch."""
    with pytest.raises(BadInput, match="--device gpu"):
        load_model(grpo.TINY_DIR, "gpu")


def test_a_tokenizer_without_pad_and_eos_is_one_sentence(monkeypatch):
    """Fault: neither a pad nor an eos token, and the rollout crashes on None."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(grpo.TINY_DIR)
    tokenizer.pad_token = tokenizer.eos_token = None
    monkeypatch.setattr(common.AutoTokenizer, "from_pretrained", lambda *given, **more: tokenizer)
    with pytest.raises(BadInput, match="neither a pad nor an eos"):
        load_model(grpo.TINY_DIR, "cpu")
