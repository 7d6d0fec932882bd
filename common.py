"""What the five scripts share, in five sections that can be read one by one:

models · the optimizer and its processes · log-probs and entropies · the verifier · data and runs
"""

import contextlib
import copy
import dataclasses
import datetime
import fcntl
import functools
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

# Before torch is imported: otherwise the growing cache of a rollout strands tens of GB on a GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import load_dataset
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import DynamicCache, HfArgumentParser, PreTrainedConfig, logging

ROOT = Path(__file__).resolve().parent


class BadInput(ValueError):
    """Unusable input. The message is one sentence that says what to do; scripts exit with 2."""


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- models: loading, saving, prompts, checks at the start ---
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
PROMPT_DATE = "26 Jul 2024"  # where a chat template writes today's date (Llama 3.2, Granite)
PEFT_PREFIX = "base_model.model."  # of the names in peft's files


def load_model(name, device=None, trainable=True, lora_rank=0, seed=0):
    """Load a causal language model and its tokenizer from the hub or a local folder.

    float32 on CPU, bf16 on a GPU. Dropout is 0 in training mode too: the ratio must be 1 before the
    first update. With lora_rank only adapters, drawn from the seed, are trained. A checkpoint with
    adapters is loaded as its base model plus adapters. Raises BadInput if that is not possible.
    """
    device = find_device(device)
    adapters = Path(name, "adapters")
    base = str(name)
    if adapters.is_dir():
        saved = json.loads((adapters / "adapter_config.json").read_text())
        base = locate(saved["base_model_name_or_path"])
        if trainable and saved["r"] != lora_rank:
            raise BadInput(f"{adapters} has rank {saved['r']}: use --lora_rank {saved['r']}")
    with local_rank_0_first():
        model, tokenizer = load_pretrained(base, DTYPES[device.type])
    model.to(device)
    if adapters.is_dir() or trainable and lora_rank > 0:
        add_adapters(model, base, adapters, lora_rank, seed)
    if not trainable:
        model.requires_grad_(False)
    return model.eval(), tokenizer


def add_adapters(model, base, saved, lora_rank, seed):
    """Put adapters into every linear layer but the head: saved ones, else new ones (B is 0)."""
    import peft  # here, because it takes three seconds

    if saved.is_dir():
        config = peft.LoraConfig.from_pretrained(saved)
    else:
        config = peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        if Path(base).is_dir():
            base = Path(base).resolve()  # found again from any working directory
        config.base_model_name_or_path = portable(base)
    torch.manual_seed(seed % 2**63)
    peft.inject_adapter_in_model(config, model)
    if saved.is_dir():
        weights = load_file(saved / "adapter_model.safetensors")
        weights = {key.removeprefix(PEFT_PREFIX): weight for key, weight in weights.items()}
        try:
            peft.set_peft_model_state_dict(model, weights)
        except RuntimeError as error:
            raise BadInput(f"{saved} does not fit the base model {base}") from error


def find_device(name):
    """The device of --device, by default CUDA where there is a GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # a new plan for every length: reportedly 30 ms
    if name not in (None, "cpu", "cuda"):
        raise BadInput(f"--device {name}: must be cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_pretrained(name, dtype):
    """A model on the CPU and its tokenizer, with dropout off and a pad token that it knows."""
    logging.disable_progress_bar()  # only the bar for loading weights, not that of downloads
    is_path = name.startswith(("/", ".")) or name.count("/") > 1  # a hub name is owner/model
    if is_path and not Path(name).is_dir():
        raise BadInput(f"cannot load the model {name}: there is no such folder")
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        as_loaded = (copy.deepcopy(config), tokenizer.pad_token)
        nested = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
        for part in (config, *nested):
            for key, value in vars(part).items():  # attn_pdrop, layerdrop, router_jitter_noise, ...
                if isinstance(value, float) and ("drop" in key or "jitter" in key):
                    setattr(part, key, 0.0)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    except Exception as error:  # each library raises its own errors
        reason = first_line(error)
        raise BadInput(f"cannot load the model {name} from a folder or hub: {reason}") from error
    model.as_loaded = as_loaded  # save_model puts these back, since the changes are not the model's
    known = range(model.get_input_embeddings().num_embeddings)
    if tokenizer.pad_token_id not in known:
        tokenizer.pad_token = tokenizer.eos_token  # any token would do, since padding is masked
    if tokenizer.pad_token_id not in known:
        raise BadInput(f"the tokenizer of {name} needs a pad or eos token that the model knows")
    return model, tokenizer


def save_model(model, tokenizer, folder):
    """Save as a Hugging Face folder; only the weights differ from what was loaded.

    Adapters are merged in float32 without touching the live weights, and saved in adapters/ too.
    """
    now = (model.config, tokenizer.pad_token)
    model.config, tokenizer.pad_token = model.as_loaded
    state = model.state_dict()
    for key in [key for key in state if key.endswith(".base_layer.weight")]:
        layer = model.get_submodule(key.removesuffix(".base_layer.weight"))
        merged = state[key].float() + layer.get_delta_weight("default").float()
        state[key] = merged.cpu()  # one layer at a time on the GPU
    merged = {key.replace(".base_layer", ""): x for key, x in state.items() if "lora_" not in key}
    model.save_pretrained(folder, state_dict=merged)
    tokenizer.save_pretrained(folder)
    model.config, tokenizer.pad_token = now
    if hasattr(model, "peft_config"):
        model.peft_config["default"].save_pretrained(folder / "adapters")
        from peft import get_peft_model_state_dict  # already loaded, by add_adapters

        weights = get_peft_model_state_dict(model)
        weights = {PEFT_PREFIX + key: weight.contiguous() for key, weight in weights.items()}
        save_file(weights, folder / "adapters/adapter_model.safetensors")


def load_policy(name, args):
    """The model to train, or with --steps 0 to evaluate, and its tokenizer."""
    training = args.steps > 0
    model, tokenizer = load_model(name, args.device, training, args.lora_rank, args.seed)
    if training and args.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            name = type(model).__name__
            raise BadInput(f"{name} cannot recompute activations: use --no_gradient_checkpointing")
        model.activation_checkpointing_enable()
    return model, tokenizer


def load_reference(model, args):
    """The model that the run started from, frozen, also after a resume; None with --steps 0.

    With adapters it is a second tree of modules, without adapters, over the same base weights.
    """
    if args.steps == 0:
        return None
    if args.lora_rank == 0 or Path(args.model, "adapters").is_dir():
        return load_model(args.model, args.device, trainable=False)[0]
    reference = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    layers = [(key, x) for key, x in reference.named_modules() if hasattr(x, "base_layer")]
    for key, layer in layers:
        reference.set_submodule(key, layer.base_layer)
    return reference


def stop_token_ids(model, tokenizer, args):
    """Ids that end a response: the tokenizer's eos, the generation config's, the end of a turn."""
    ids = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id  # an int, a list or None
    ids.update(configured if isinstance(configured, list) else [configured])
    if tokenizer.chat_template:
        # A turn may end with another token than eos (Llama, Qwen): see what follows an answer.
        turn = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        after = render(tokenizer, turn, args).rpartition("ANSWER")[2]
        for token in tokenizer(after, add_special_tokens=False).input_ids[:1]:
            if token in tokenizer.added_tokens_decoder:
                ids.add(token if tokenizer.added_tokens_decoder[token].special else None)
    return sorted(ids - {None})


def render(tokenizer, chat, args, **options):
    """A chat as text, by the tokenizer's template and the variables of --chat_template_kwargs."""
    options |= json.loads(args.chat_template_kwargs)
    date = f"{{% macro strftime_now(format) %}}{PROMPT_DATE}{{% endmacro %}}\n"
    try:
        template = date + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, **options)
    except Exception as error:  # raised by the template or its syntax
        raise BadInput(f"the tokenizer's chat template fails: {first_line(error)}") from error


def as_chat(question):
    """A question, which is a text or already a list of chat messages, as such a list."""
    return [{"role": "user", "content": question}] if isinstance(question, str) else question


def encode_prompts(tokenizer, questions, args):
    """Token ids of prompts: the chat template's, or "Question: ... Answer:" for a base model.

    --instruction is appended to the question. The template writes its own BOS if it wants one,
    otherwise the tokenizer adds it: never both.
    """
    texts = []
    for question in questions:
        *before, last = as_chat(question)
        last = last | {"content": f"{last['content']}\n{args.instruction}".strip()}
        if tokenizer.chat_template:
            texts.append(render(tokenizer, [*before, last], args, add_generation_prompt=True))
        else:
            text = "\n".join(turn["content"] for turn in [*before, last])
            texts.append(f"Question: {text}\nAnswer:")
    if tokenizer.chat_template or not texts:
        return tokenizer(texts, add_special_tokens=False).input_ids if texts else []
    prompts = tokenizer(texts).input_ids
    for ids in prompts:  # a tokenizer may append eos, after which there is nothing to answer
        while ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            ids.pop()
    return prompts


def pad_left(problems, pad, device):
    """The prompts of P problems, padded on the left, and their attention mask: (P, S) each."""
    prompts = [problem["prompt_ids"] for problem in problems]
    S = max(map(len, prompts))
    ids = [[pad] * (S - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (S - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def is_finite(model):
    """Whether the weights are finite, and the logits of a few tokens."""
    ids = torch.arange(1, 9, device=model.device)[None]
    logits = head_logits(model, last_hidden_states(model, ids, torch.ones_like(ids))[0])
    return all(x.isfinite().all() for x in (logits, *model.parameters()))


@torch.no_grad()
def check_model(model, problems, args):
    """Raise BadInput at the start for what would fail, or be wrong, in the middle of a run."""
    name = type(model).__name__
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond it, a row's log-probs depend on others
        context = rope["original_max_position_embeddings"]
    longest = max((len(problem["prompt_ids"]) for problem in problems), default=0)
    if longest + args.max_new_tokens > context:
        both = f"--max_new_tokens {args.max_new_tokens} after a prompt of {longest} tokens"
        raise BadInput(f"{both} exceeds the model's context of {context}: lower --max_new_tokens")
    known = model.get_input_embeddings().num_embeddings
    largest = max((max(problem["prompt_ids"]) for problem in problems), default=0)
    if largest >= known:
        raise BadInput(f"a prompt contains token id {largest}, but {args.model} knows only {known}")
    # Compare the plain model with what rollout does: here two columns of padding, a cached token.
    ids = torch.arange(1, 9, device=model.device)[None]
    mask = (ids > 2).long()
    try:
        theirs = model(ids[:, 2:], use_cache=False).logits[0].float()  # (6, V)
        cache = DynamicCache(config=model.config)
        prompt = last_hidden_states(model, ids[:, :7], mask[:, :7], cache)[0, 2:]
        token = last_hidden_states(model, ids[:, 7:], mask, cache)[0]
        ours = head_logits(model, torch.cat([prompt, token]))
    except Exception as error:
        raise BadInput(f"{name} cannot be used here: {first_line(error)}") from error
    if not is_finite(model):
        raise BadInput(f"the weights or logits of {model.name_or_path} are not finite: use another")
    # Healthy models differ by at most 1e-4 of the spread in float32 and 0.02 in bf16.
    limit = theirs.std() * (1e-3 if model.dtype == torch.float32 else 0.3)
    if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= limit:  # NaN too
        uses = "computes its logits, or uses cache or padding,"
        raise BadInput(f"{name} {uses} in a way that common.py does not know")


def check_sampling(batch):
    """Raise BadInput where sampling and training disagree on the log-probs of the responses.

    Healthy models differ by 1e-6 in float32 and 0.02 to 0.04 in bf16. A cache that forgets, or
    padding that is read as text, gives about 1.
    """
    difference = (batch.sampled_logps - batch.old_logps).abs().where(batch.mask, 0.0)  # (B, T)
    worst = (difference.sum(1) / batch.mask.sum(1)).max().item()
    mean = (difference.sum() / batch.mask.sum()).item()
    limit = 0.01 if DTYPES[batch.mask.device.type] == torch.float32 else 0.2
    if worst > 0.5 or mean > limit:
        both = f"{mean:.2g} on average and {worst:.2g} in the worst response"
        raise BadInput(
            f"sampling and training disagree on log-probs by {both}: this model's cache or padding "
            "does not work with rollout, or sample does not draw from softmax(logits / T)")


def check_rewards(rewards):
    """Raise BadInput if compute_reward returned anything but a finite number."""
    for reward in rewards:
        try:
            finite = math.isfinite(reward) and abs(reward) < 3e38  # in float32
        except (OverflowError, TypeError, ValueError, RuntimeError):
            finite = False
        if not finite:
            raise BadInput(f"compute_reward returned {reward!r}, which is not a finite number")


def check_results(advantages, weights, mask):
    """Raise BadInput if a result of the algorithm is not finite, or not of the mask's shape."""
    for name, x in ("compute_advantages", advantages), ("compute_weights", weights):
        found = f"shape {tuple(x.shape)}" if torch.is_tensor(x) else repr(x)[:60]
        if found != f"shape {tuple(mask.shape)}":
            raise BadInput(f"{name} returned {found}, but the mask has shape {tuple(mask.shape)}")
        if not x[mask].isfinite().all():
            raise BadInput(f"{name} returned NaN or inf for a response token")


# --- the optimizer: float32 weights, and the processes of torchrun ---
def world():
    """This process' number and how many there are: (0, 1) unless torchrun started several."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def start_process(device):
    """Join the processes that torchrun started, if it did."""
    if "LOCAL_RANK" not in os.environ:
        return
    backend = "gloo"
    if find_device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # or all processes take the first GPU
        backend = "cpu:gloo,cuda:nccl"
    # Others wait while one decodes, verifies, downloads or saves, which may take a long time.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))


@contextlib.contextmanager
def local_rank_0_first():
    """One process per machine downloads; the others then find the files."""
    waits = dist.is_initialized() and os.environ.get("LOCAL_RANK", "0") != "0"
    if waits:
        dist.barrier()
    yield
    if dist.is_initialized() and not waits:
        dist.barrier()


BUNDLE = 2**20  # elements; smaller weights share one, since each collective takes milliseconds


class Float32AdamW:
    """AdamW on float32 copies of the trainable weights, sharded if there are several processes.

    In bf16, 1 + 1e-6 rounds to 1. Each copy is a flat tensor: one large weight, or a bundle of
    small ones. In a single process the copy of a large float32 weight shares its storage.
    """

    def __init__(self, model, args):
        self.max_grad_norm = args.max_grad_norm
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not self.weights:  # with --steps 0
            return
        self.bundles = make_bundles(self.weights)
        self.mesh = None
        if dist.is_initialized():
            self.mesh = init_device_mesh(self.weights[0].device.type, (dist.get_world_size(),))
        self.masters = [self.shard(flat(bundle)) for bundle in self.bundles]
        self.grads = {}  # by weight: whole, float32, summed over micro-batches
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.collect)
        self.adamw = torch.optim.AdamW(self.masters, args.learning_rate, weight_decay=0, fused=True)
        self.copy_to_weights()  # rank 0's, so that all processes start alike

    def shard(self, tensor):
        """This process' part of a flat tensor; for a single process the tensor itself."""
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, [Shard(0)])

    def collect(self, weight):
        """Take a micro-batch's gradient as soon as it is complete, and free the model's."""
        if weight in self.grads:
            self.grads[weight].add_(weight.grad)  # bf16 into float32, without a float32 copy of it
        else:
            self.grads[weight] = weight.grad.float()
        weight.grad = None

    def take_grad(self, weight):
        """Remove and return a weight's gradient; zeros if the weight took no part."""
        grad = self.grads.pop(weight, None)
        return torch.zeros_like(weight) if grad is None else grad

    @torch.no_grad()
    def step(self, learning_rate, skip=False):
        """One update with the gradients so far, averaged over processes; returns their norm.

        No weight changes if the norm is not finite, or if all processes ask to skip: then the
        norm is 0. No collective runs before this, so processes may have unequal micro-batches.
        """
        if self.mesh is not None:  # decided together: the others would wait for one that skips
            all_skip = torch.tensor(float(skip), device=self.weights[0].device)
            dist.all_reduce(all_skip, dist.ReduceOp.MIN)
            skip = all_skip.item() == 1
        if skip:
            self.grads = {}
            return 0.0
        for bundle, master in zip(self.bundles, self.masters):
            grad = flat([self.take_grad(weight) for weight in bundle])
            if self.mesh is not None:  # a reduce-scatter: the mean, of which each keeps its shard
                grad = DTensor.from_local(grad, self.mesh, [Partial("avg")], run_check=False)
                grad = grad.redistribute(placements=master.placements)
            master.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        norm = whole(norm).item()
        if 0 < norm < math.inf:  # at 0, Adam's momentum would move the weights
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.adamw.step()
            self.copy_to_weights()
        self.adamw.zero_grad()
        return norm

    @torch.no_grad()
    def copy_to_weights(self):
        """Round the float32 weights into the model's."""
        for bundle, master in zip(self.bundles, self.masters):
            if len(bundle) == 1:
                master = master.to(bundle[0].dtype)  # rounded first: half the traffic
            values = whole(master).split([weight.numel() for weight in bundle])
            for weight, value in zip(bundle, values):
                weight.copy_(value.view_as(weight))

    def state_dict(self):
        """The float32 weights and Adam's moments, gathered one tensor at a time to rank 0's CPU."""
        adamw = self.adamw.state_dict()
        for i, state in adamw["state"].items():
            adamw["state"][i] = {name: to_rank_0(value) for name, value in state.items()}
        return {"masters": [to_rank_0(master) for master in self.masters], "adamw": adamw}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Take over a saved state, also one of another number of processes."""
        if [saved.shape for saved in state["masters"]] != [x.shape for x in self.masters]:
            fresh = "start a new run from it with --model"
            raise BadInput(f"the checkpoint's optimizer.pt is of another model or version: {fresh}")
        for master, saved in zip(self.masters, state["masters"]):
            master.copy_(self.shard(saved.to(master.device)))
        for moments in state["adamw"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):  # copied: the mapped file may be deleted
                moments[name] = self.shard(moments[name].to(self.weights[0].device, copy=True))
        self.adamw.load_state_dict(state["adamw"])
        self.copy_to_weights()


def make_bundles(weights):
    """Lists of weights: a large one alone, small ones together up to BUNDLE elements."""
    bundles = [[]]
    for weight in sorted(weights, key=lambda weight: weight.numel()):
        others = bundles[-1]
        if others and weight.numel() + sum(other.numel() for other in others) > BUNDLE:
            bundles.append([])
        bundles[-1].append(weight)
    return bundles


def flat(tensors):
    """Tensors end to end in float32; a single one shares its storage where it can."""
    parts = [tensor.detach().float().flatten() for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def whole(tensor):
    """A tensor that may be sharded, in full on every process. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_rank_0(tensor):
    """A sharded tensor in full on rank 0's CPU, None elsewhere. All processes must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = whole(tensor)
    return tensor.cpu() if dist.get_rank() == 0 else None


# --- log-probs and entropies ---
# Tokens whose logits exist at once. On CPU at V = 32k, 64 and 256 are slower by 13 and 18 %. Not
# measured on a GPU: at V = 152k a chunk's logits are 622 MB, and two or three of them exist.
CHUNK_TOKENS = {"cpu": 128, "cuda": 1024}
CHUNK_LOGITS = 2**22  # with a small vocabulary, as many tokens as make this many logits


def last_hidden_states(model, ids, attention_mask, cache=None):
    """The decoder's output (b, s, H) for ids (b, s); the mask also covers what the cache holds."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # left padding shifts no position
    return model.get_decoder()(
        input_ids=ids, attention_mask=attention_mask, position_ids=positions[:, -ids.shape[1] :],
        cache=cache, use_cache=cache is not None).last_hidden_state


def next_token_logits(model, ids, attention_mask, cache):
    """Logits (b, V) for the token after ids (b, s)."""
    return head_logits(model, last_hidden_states(model, ids, attention_mask, cache)[:, -1])


def head_logits(model, hidden):
    """Logits (n, V) for hidden states (n, H), in float32."""
    head = model.get_output_embeddings()
    return project(hidden, head.weight, head.bias, *scale_and_cap(model))


def scale_and_cap(model):
    """What the model's family makes of the head's output x: cap tanh(scale x / cap)."""
    config = model.config.get_text_config()
    scale = 1 / (getattr(config, "logits_scaling", None) or 1)
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(config, name, None) or 1
    return scale, getattr(config, "final_logit_softcapping", None)


def project(hidden, weight, bias, scale, cap):
    """z = cap tanh(scale x / cap), x = hidden @ weight.T + bias: (n, V) in float32.

    The factors keep the model's precision; the sums are float32.
    """
    if hidden.dtype == torch.float32:
        z = F.linear(hidden, weight, bias)
    elif hidden.is_cuda:
        z = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        z = z if bias is None else z.add_(bias)
    else:  # the CPU has no such product
        z = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if scale != 1:
        z *= scale
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


class ChunkedLogps(torch.autograd.Function):
    """log p(target) and the entropy of p = softmax(z), with z from project.

    No (N, V) tensor exists: backward computes each chunk's z again. With g = dL/dlogp:
        logp = z[target] - log sum_v exp(z_v)            so  dL/dz_v = g (1[v = target] - p_v)
        dz/dx = scale, with a cap scale (1 - (z/cap)^2)   so  dL/dx = dL/dz dz/dx
        dL/dhidden = dL/dx @ weight, dL/dweight = sum over chunks of (dL/dx).T @ hidden
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, cap):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scale = scale
        ctx.cap = cap
        size = max(CHUNK_TOKENS[hidden.device.type], CHUNK_LOGITS // len(weight))
        ctx.chunks = [slice(i, i + size) for i in range(0, len(hidden), size)]
        logps = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)  # (N,)
        entropies = torch.empty_like(logps)
        for c in ctx.chunks:
            logq = project(hidden[c], weight, bias, scale, cap).log_softmax(-1)  # (n, V)
            logps[c] = logq.gather(-1, targets[c, None]).squeeze(-1)
            entropies[c] = logq.exp().mul_(logq).sum(-1).neg()
            del logq  # before the next chunk's
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        hidden, weight, bias, targets = ctx.saved_tensors
        # Summed in float32, as bf16 would round once per chunk: for the head one (V, H) buffer,
        # 1.2 GB at V = 152k and H = 2,048. A frozen head costs nothing.
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        g = g[:, None] * ctx.scale  # (N, 1)
        for c in ctx.chunks:
            z = project(hidden[c], weight, bias, ctx.scale, ctx.cap)  # (n, V)
            slope = None if ctx.cap is None else 1 - (z / ctx.cap) ** 2
            # In z's memory, which works because softmax reads an element before it writes it.
            dx = torch.softmax(z, -1, out=z).mul_(-g[c]).scatter_add_(-1, targets[c, None], g[c])
            if slope is not None:
                dx *= slope
            dx = dx.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[c] = dx @ weight
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(dx.T, hidden[c])  # adds in place
            elif d_weight is not None:
                d_weight += dx.T @ hidden[c]  # addmm_ does not mix precisions
            if d_bias is not None:
                d_bias += dx.sum(0)
            del z, dx
        grads = [d if d is None else d.to(weight.dtype) for d in (d_hidden, d_weight, d_bias)]
        return *grads, None, None, None


def token_logps_and_entropies(model, input_ids, attention_mask, completion_len, temperature=1.0):
    """Log-probs of the last completion_len tokens under softmax(logits / temperature), and that
    distribution's entropies over the whole vocabulary, without gradient: (B, T) float32 each.

    The (B, T, V) logits never exist: the head works on a chunk of tokens at a time.
    """
    targets = input_ids[:, -completion_len:]  # (B, T)
    # Position t predicts token t + 1: the last token is not needed.
    hidden = last_hidden_states(model, input_ids[:, :-1], attention_mask[:, :-1])
    hidden = hidden[:, -completion_len:].flatten(0, 1)  # (B T, H)
    head = model.get_output_embeddings()
    scale, cap = scale_and_cap(model)
    cap = None if cap is None else cap / temperature  # dividing z divides its cap too
    both = ChunkedLogps.apply(
        hidden, head.weight, head.bias, targets.flatten(), scale / temperature, cap)
    return tuple(x.view(targets.shape) for x in both)


# --- the verifier ---
# docs/verifier.md says what counts as equal. An answer is brought into one spelling and compared
# part by part: numbers exactly, expressions by value, in a separate process that has limits.
MAX_CHARS = 500  # the longest gold of GSM8K, MATH-500, AMC, AIME and Minerva has 91
MAX_DEPTH = 12  # brackets inside brackets
CPU_SECONDS = 1.0  # per verdict, in the separate process; most take 0.01 to 0.1
OR = " ||| "  # between the alternatives of a gold that has several
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACED = r"(?:\\.|[^\\{}])*"  # \\. steps over \{ and \}
for _ in range(MAX_DEPTH):
    BRACED = r"(?:\\.|[^\\{}]|\{" + BRACED + r"\})*"
CLOSED = re.compile(rf"(?s)({BRACED})\}}")  # what follows the brace of a box
NO_GOLD = r"-?inf|nan|none|null|n/a|unknown|omitted|proof|not ?found|see (the )?solution|\W*"
SPELLINGS = {  # one spelling, and what is replaced by it
    "": r"\ $ \$ % \% € £ \left \right \big \Big \bigl \bigr \( \) \displaystyle",
    " ": r"~ \, \: \; \> \quad \qquad", "-": "−", ",": "{,}", "^": "**", "^2": "²", "^3": "³",
    r"^\circ ": "°", r"\cdot ": "* ·", r"\times ": "×", r"\pm ": "±", r"\cup ": "∪", r"\in ": "∈",
    "<": r"\lt", ">": r"\gt", "<=": r"≤ \le \leq \leqslant", ">=": r"≥ \ge \geq \geqslant",
    r"\frac": r"\dfrac \tfrac", r"\emptyset ": r"∅ \varnothing", r"\infty ": "∞ infinity",
    r"\ne ": r"≠ \neq", r"\sqrt ": "√", r"\pi ": "π", ";": "and or"}  # fmt: skip
SPELLED = {other: one for one, others in SPELLINGS.items() for other in others.split()}
SPELLED |= {name: rf"\{name} " for name in "sqrt pi theta sin cos tan ln log".split()}
# Words after a number are a unit if one of them is a plural or a known unit (after 1: any word),
# and none changes the number, takes it back or offers another: 2 million, 3 fifths, 18 is wrong.
UNIT = (
    r"(?:(?<=^1)|(?=.*(?<![a-z])(?:[a-z]{2,}s|(?:wo)?men|people|children|feet|foot|inch|mile|degree"
    r"|percent|cent|dollar|unit|hour|minute|second|day|week|month|year|mph|[kcmn]m|[km]g|lb|oz|ft"
    r"|Hz|[mgshLNJWVACK])\b))(?!.*\b(?i:(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven"
    r"|twelve|\w+teen|\w+ty|\w*illion|hundred|thousand|dozen|lakh|crore|score|gross|half|halve"
    r"|third|quarter|(?!month)\w+th|mil|[mb]n|grand)s?|is|are|was|has|does|not?|cannot|never|wrong"
    r"|false|but|if|plus|minus|negative|times|over|by|point|mod|base|squared|cubed|less|than|most"
    r"|below|this|yes|cos)\b)")
REWRITES = [  # in this order
    (r"\\(?:text[a-z]*|[mh]box|math(?:rm|bf|it|sf)|operatorname) ?\{|\{\\rm ", r"\\text{"),
    (r"\\! ?", ""), (r"\\rm ", ""), (r"\\\{ ?\\\}", r"\\emptyset "),
    (r"\^\{?\\prime ?\\prime\}?|''", "_{pp}"), (r"\^\{?\\prime\}?|'", "_{p}"),  # y' is not y
    (r"\^ ?\{? ?\\circ ?\}?(?: ?[CF]$)?", ""), (r",? ?(?:\\text\{[, ]*;[, ]*\}|;) ?|, ", ";"),
    (r"\\sqrt ?\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),  # \sqrt(51) is \sqrt{51}
    (r"\\(frac|sqrt|binom) ?(\\pi|\d|[a-zA-Z])", r"\\\1{\2}"),  # \frac12 is \frac{1}2
    (r"(\\frac ?\{" + BRACED + r"\}) ?(\\pi|\d|[a-zA-Z])", r"\1{\2}"),  # is \frac{1}{2}
    (r"([_^]) ?(?:\(([^()]*)\)|\{ ?(-?\d+|\w) ?\}|(-?\d+|\w))", r"\1{\2\3\4}"),  # x^2 is x^{2}
    (r"^(.*[\w)}])(?= ?\\text)" + UNIT + r" ?((\\text\{[a-zA-Z /.()-]*}(\^\{-?\d})? ?)+)$", r"\1"),
    (r"^((?:\w ?= ?)?(?:[^a-zA-Z\\]|\\frac|\\times)*)(?= ?\(?[a-zA-Z])" + UNIT  # after a number
     + r"(?: \(?|(?<=\d)(?=[kcm]m|kg))[a-zA-Z]{2}[a-zA-Z /]*\)?(?:\^\{-?\d\})?$", r"\1"),
    (r"\\text\{([^{}]*)\}", r"\1"), (r"^\\?\{(.*?)\\?\}$", r"\1"),  # {1,2} is 1,2
    (r"^ *\(([^()\[\],;]*)\)$", r"\1"), (r"(?<!\w) | (?!\w)", ""),  # (B) is B, x - 1 is x-1
    (r"(^|[(\[,;=])\+", r"\1"), (r"([^,;]*)\\pm([^,;]*)", r"\1+\2;\1-\2")]  # fmt: skip
NUMBER = re.compile(r"-?(?:(?:\d+ )?\d+/0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)", re.A)
RELATION = r"[<>]=?|=|\\(?:ne|equiv|approx|sim|simeq|cong|in|to|propto)(?![a-z])"
NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{\w+\})?(?:\([a-z]\))?"
# The front of x=5, x_1=5, f(x)=2x, \theta=5, (x,y)=(1,2) and x\in[1,2], and what follows it
LABEL = rf"(?:({NAME}|\({NAME}(?:[,;]{NAME})*\))(?:=|\\in(?![a-z]))(?!.*(?:{RELATION})))?(.*)"
MISREAD = re.compile(  # what math-verify's parser takes for something else; words are not products
    r"[^ -~]|[?#@:\"~`]|\\(?:text|sum|prod|int|lim|mod|to|det|max|min|gcd|lcm|partial|xrightarrow)"
    r"|\d_|\d[eE][-+]?\d|\\frac\{d|[\d)}\]] ?[(\[]-?\d+(?:/\d+)?[)\]]|\d +\d|(?<!matrix)(?<!_\{\d)"
    r"(?<!_\{\d\d)[)}\]]\d|(?<![a-zA-Z}\]_^\\])\{|^[a-zA-Z]{2,}$|(?<![a-zA-Z\\{])[a-zA-Z]{4}")


def last_answer(completion):
    """The content of the last box, else the number after the last ####, else None."""
    *before, body = BOX.split(completion)
    if before:  # if it was cut off before it closed, an earlier box was not the last word
        closed = CLOSED.match(body[: MAX_CHARS + 1])
        return (closed[1].strip() or None) if closed else None
    *before, body = completion.rsplit("####", 1)
    line = re.split(r"[ *]*(?:\n|$|[,;:.] +(?![-+\d]|and |or ))", body[:MAX_CHARS].strip(" \n*"))[0]
    return line if before and parse_number(normalize(line)) else None  # 42 eggs, not 43: the 42


@functools.lru_cache(maxsize=10_000)
def normalize(text):
    """One spelling for all the spellings of an answer."""
    if NUMBER.fullmatch(text):
        return text
    text = re.sub(r"\\?[a-zA-Z]+|\\\S|\{,\}|\*\*|.", lambda x: SPELLED.get(x[0], x[0]), text)
    text = " ".join(text.split())
    for pattern, new in REWRITES:
        text = re.sub(pattern, new, text.strip().rstrip(".,; "))
    styles = (text.title(), text.upper(), text.capitalize())  # the case of AaBb has a meaning
    return text.lower() if re.fullmatch("(?i)[a-z -]{3,}|no", text) and text in styles else text


def parse_number(text):
    """(exact value, whether it is a decimal that is no integer), or None."""
    if not NUMBER.fullmatch(text):
        text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}$", r" \1/\2", text).replace("- ", "-").strip()
        text = re.sub(r"(?<![\d.])10\^\{\+?(-?\d+)\}$", r"1e\1", text)  # but not 310^{2}
        text = re.sub(r"\\(?:times|cdot) ?1e", "e", text)  # 3\times 10^8 is 3e8
        if re.fullmatch(r"-?\d{1,3}(?:[, ]\d{3})+(?:\.\d*)?", text):  # 1,234.50
            text = re.sub("[, ]", "", text)
        if not NUMBER.fullmatch(text):
            return None
    *whole, part = text.lstrip("-").split()  # 1 1/2 is a mixed number
    value = sum(map(Fraction, whole), Fraction(part))
    return (-value if text[0] == "-" else value), "/" not in text and value.denominator > 1


def split(text):
    """(kind, parts) of an answer: ",," and three, "<=" and two sides, "(,)" and two of a point."""
    outside = text
    for _ in range(MAX_DEPTH):
        outside = re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", lambda inside: "_" * len(inside[0]), outside)
    if re.search(r"[()\[\]{}]", outside):
        return None, []  # unreadable: brackets too deep, or without their other half
    for separator in "[,;]", r"\\cup(?![a-z])", RELATION:
        cuts = [at for found in re.finditer(separator, outside) for at in found.span()]
        if cuts:
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            if parts[1][0] == ">":  # x>3 is 3<x
                parts = [part.translate(str.maketrans("<>", "><")) for part in parts[::-1]]
            return "".join(parts[1::2]).replace(";", ","), parts[::2]
    kind, parts = split(text[1:-1]) if text[:1] in ("(", "[") else ("", [])
    return (text[0] + kind + text[-1], parts) if kind and kind[0] == "," else ("", [text])


def equivalent(gold, text):
    """Whether two normalized answers are equal. The gold says which form is asked for."""
    if gold == text:
        return True
    (name, asked), (label, given) = (re.fullmatch(LABEL, one).groups() for one in (gold, text))
    if len({name, label} - {None}) == 1 and not re.search(RELATION, asked + given):
        return equivalent(asked, given)  # x=5 and 5, but not x=5 and y=5
    a, b = parse_number(asked), parse_number(text)
    if a and b:  # a decimal may be off by one in a million: 0.3333333 is 1/3, 0.333 is not
        return a[0] == b[0] or (a[1] or b[1]) and abs(a[0] - b[0]) * 10**6 <= abs(a[0])
    (kind, golds), (given_kind, texts) = split(gold), split(text)
    if not a and kind == given_kind == "":
        return library_equal(gold, text)
    if a or not kind or kind != given_kind:  # only a number equals a number, only a list a list
        return False
    names, labels = ({re.match(LABEL, one)[1] for one in parts} for parts in (golds, texts))
    ordered = not kind.startswith((",", r"\cup")) or len(names) > 1 and labels == {None}
    for one in golds:  # each as often as in the other
        candidates = texts[:1] if ordered else texts
        found = next((x for x in candidates if equivalent(one, x)), None)
        if found is None:
            return kind == "=" and library_equal(gold, text)
        texts.remove(found)
    return True


def library_worker(resource, sympy, latex2sympy2):
    """Reply to each line [CPU seconds left, gold, text] with [equal or not, CPU seconds left]."""
    @functools.lru_cache(maxsize=1000)
    def value(text):  # of an equation, the difference between its sides
        letters = r"(\\(?!gamma|Gamma)[a-zA-Z]+)|\\?(gamma|Gamma|[IdT])"  # not functions
        text = re.sub(letters, lambda match: match[1] or rf"\mathit{{{match[2]}}}", text)
        text = re.sub(r"(?<![\w.^}])(\d+) ?(\\frac\{\d+\}\{\d+\})", r"(\1+\2)", text)  # 1\frac12\pi
        text = re.sub("(.*)=(.*)", r"(\1)-(\2)", text)
        config = latex2sympy2.ConversionConfig(lowercase_symbols=False)
        parsed = latex2sympy2.latex2sympy(text, normalization_config=None, conversion_config=config)
        return parsed.xreplace({sympy.Symbol("i"): sympy.I}).doit()

    def same(a, b, ratio):  # exactly, or at four points; equations if some ratio is constant
        if hasattr(a, "shape") or hasattr(b, "shape"):  # matrices
            return a.shape == b.shape and all(same(x, y, ratio) for x, y in zip(a, b))
        if ratio is None and not (a.free_symbols and b.free_symbols):
            return False  # 2+2=4 and 5=6
        if a == b or a.is_Rational and b.is_Rational:
            return a == b
        tolerance = 1e-6 if a.has(sympy.Float) or b.has(sympy.Float) else 1e-30
        unknown = sympy.Tuple(a, b).atoms(sympy.Symbol, sympy.core.function.AppliedUndef)  # f(2)
        unknown = sorted(unknown, key=str)
        for draw in map(random.Random, range(2, 6)):  # of both signs: \sqrt{x^2} is not x
            point = {x: sympy.Rational(draw.randrange(-(10**6), 10**6), 314159) for x in unknown}
            x, y = a.xreplace(point).evalf(50), b.xreplace(point).evalf(50)
            ratio = ratio or x / y
            if not abs(x - ratio * y) < tolerance * abs(x):  # or one of them is infinite
                return False
        return True

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    print(value(r"\frac{x_{1}}{y}+\sin x"), flush=True)  # slow the first time: no verdict's time
    for line in sys.stdin:  # ends with the caller
        seconds, gold, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time, after which the process is killed
        signal.alarm(60)  # for one that waits without computing
        equal = False
        with contextlib.suppress(Exception):
            equal = bool(same(value(gold), value(text), None if "=" in gold else 1))
        signal.alarm(0)
        print(json.dumps([equal, signal.setitimer(signal.ITIMER_PROF, 0)[0]]), flush=True)


WORKER = [sys.executable, "-c", (  # a process without torch; read now: the file may be edited
    "import contextlib, functools, json, random, re, resource, signal, sys, sympy\n"
    "from latex2sympy2_extended import latex2sympy2  # math-verify's parser\n"
    f"{inspect.getsource(library_worker)}library_worker(resource, sympy, latex2sympy2)")]
library = {"process": None, "owner": None, "timeouts": 0}
library_lock = threading.Lock()
budget = threading.local()  # .seconds that this thread's verdict may still compute


@functools.lru_cache(maxsize=10_000)
def library_equal(gold, text):
    """Ask the worker, one question at a time. Raises TimeoutError, which is not cached."""
    if MISREAD.search(gold) or MISREAD.search(text):
        return False
    with library_lock:
        if library["owner"] != os.getpid():  # none, the parent's, or one interrupted
            library["process"] = Popen(WORKER, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            if not library["process"].stdout.readline():
                raise RuntimeError("the verifier did not start; is math-verify installed?")
        worker = library["process"]
        library["owner"] = None  # until it replies: after Ctrl-C the next question starts another
        seconds = max(budget.seconds, 0.01)  # 0 would switch the timer off
        with contextlib.suppress(BrokenPipeError, ValueError):  # no reply, because it died
            worker.stdin.write(json.dumps([seconds, gold, text]).encode() + b"\n")
            equal, budget.seconds = json.loads(worker.stdout.readline())
            library["owner"] = os.getpid()
            return equal
        if worker.wait() in (-signal.SIGPROF, -signal.SIGALRM):
            library["timeouts"] += 1
            raise TimeoutError
    return worker.returncode == -signal.SIGKILL and library_equal(gold, text)  # killed: ask again


def gold_answer(raw):
    """The gold that verify compares with, from a dataset's answer column. Of a solution it is the
    last box, or what follows ####; a list, or one in a string, holds alternatives. Or BadInput."""
    text = str(int(raw) if isinstance(raw, float) and raw.is_integer() else raw).strip()
    listed = re.fullmatch(r"""(?s)\[\s*["'](.*)["']\s*\]""", text.replace(r"\\", "\\"))
    if isinstance(raw, str) and (listed or OR in text):
        raw = re.split(r"""["']\s*,\s*["']""", listed[1]) if listed else text.split(OR)
    if isinstance(raw, list) and raw:
        return OR.join(dict.fromkeys(map(gold_answer, raw)))
    if BOX.search(text) or "####" in text:
        text = last_answer(text) or ""
    words = re.findall(r"(?<!\\)\b[A-Za-z]{2,}", text[:MAX_CHARS])
    whole = last_answer(rf"\boxed{{{text}}}") == text  # not too long, and its braces close
    placeholder = re.fullmatch(NO_GOLD, normalize(text[:MAX_CHARS]).lower())
    if len(words) > 8 or not whole or placeholder or type(raw) not in (str, int, float):
        raise BadInput(f"the gold {str(raw)[:60]!r} has no answer that can be read")
    return text


def verify(completion: str, answer: str) -> float:
    """1.0 if the completion's last box, else the number after its last ####, equals the answer."""
    golds = gold_answer(answer).split(OR)
    text = last_answer(completion) if isinstance(completion, str) else None
    budget.seconds = CPU_SECONDS
    try:
        return float(any(text and equivalent(normalize(one), normalize(text)) for one in golds))
    except TimeoutError:
        return 0.0


# --- data and runs ---
BENCHMARKS = {  # short names, for evaluation only: hub name[:configuration] and split
    "gsm8k": ("openai/gsm8k:main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", "test"),
    "amc23": ("math-ai/amc23", "test"),
    "minerva": ("math-ai/minervamath", "test"),
    "aime24": ("HuggingFaceH4/aime_2024", "train"),
    "aime25": ("math-ai/aime25", "test"),
}
# A resume may not change these, or it would be another run; other flags may change.
FIXED = """script model dataset instruction chat_template_kwargs date seed lora_rank
    prompts_per_step group_size max_prompt_tokens""".split()
# An evaluation that changes one of these is not the run's own, and gets a name.
EVALUATION = ("eval_dataset", "eval_temperature", "eval_problems", "eval_samples")


def say(text):
    """Print a line above the progress bar, once for all processes."""
    if world()[0] == 0:
        tqdm.write(text)


def locate(name):
    """A path that also finds what lies beside this file, from any working directory."""
    return str(ROOT / name) if not Path(name).exists() and (ROOT / name).exists() else name


def portable(name):
    """The inverse, for what is saved: a path beside this file becomes relative to it."""
    if name is None or not Path(name).exists():
        return name
    path = Path(name).resolve()
    return str(path.relative_to(ROOT)) if ROOT in path.parents else os.path.normpath(name)


def load_rows(source, split):
    """The rows of a split as dicts with all their columns, "question" and "answer" filled in.

    The question is the first of the columns question, problem and prompt that exists: a text or a
    list of chat messages. The answer is the column answer, else solution. [] without a test split.
    Raises BadInput, naming the file and line, for what cannot be read.
    """
    if split == "test":
        source, split = BENCHMARKS.get(source, (source, split))
    path = Path(locate(source))
    if path.is_dir():
        path = path / f"{split}.jsonl"
        if split == "test" and not path.exists() and path.with_name("train.jsonl").exists():
            return []
    place = path
    rows = []
    try:
        if path.suffix.lower() == ".jsonl":
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # with or without a BOM
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                if line.strip():
                    rows.append(dict(json.loads(line)))
        elif path.exists():
            raise BadInput("a dataset is a .jsonl file, a folder with train.jsonl, or a hub name")
        else:
            name, _, config = source.partition(":")
            config = config or ("main" if name == "openai/gsm8k" else None)
            with local_rank_0_first():
                rows = list(load_dataset(name, config, split=split))
    except Exception as error:  # each library raises its own errors
        if split == "test" and "Unknown split" in str(error):
            return []
        raise BadInput(f"cannot read the dataset {place}: {first_line(error)}") from error
    if not rows:
        raise BadInput(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        found = [row[name] for name in ("question", "problem", "prompt") if row.get(name)]
        try:
            chat = as_chat(found[0])
            text = "".join(turn["content"] for turn in chat)
            if not text.encode().strip() or chat[-1]["role"] == "assistant":
                raise ValueError  # and encode raises for a lone surrogate
        except Exception as error:
            place = f"{path}, {split} row {number}"
            needed = f"needed: a text in question|problem|prompt, not {str(found)[:60]}"
            raise BadInput(f"{place}: columns {list(row)}, {needed}") from error
        row["question"] = found[0]
        if row.get("answer") is None and "solution" in row:
            row["answer"] = row["solution"]
    return rows


def readable_golds(rows, source, at_least=0):
    """The rows with an answer that verify can read. BadInput where a tenth of them have none, or
    where fewer than at_least are left."""
    readable = []
    faults = []
    for row in rows:
        try:
            readable.append(row | {"answer": gold_answer(row.get("answer"))})
        except BadInput as error:
            faults.append(f"{str(row['question'])[:60]!r}: {error}")
    if faults:
        found = f"{source}: {len(faults)} of {len(rows)} rows lack a readable answer ({faults[0]})"
        if len(faults) * 10 >= len(rows):
            columns = [name for name in rows[0] if name != "prompt_ids"]
            raise BadInput(f"{found}; columns: {columns}, needed: answer or solution")
        if len(readable) < at_least:
            raise BadInput(f"{found}; the others are fewer than --prompts_per_step {at_least}")
        say(f"{found}: dropped")
    return readable


def load_splits(tokenizer, args):
    """Training rows (none with --steps 0) and held-out rows, each with its "prompt_ids"."""
    train = []
    if args.steps > 0:
        train = add_prompts(load_rows(args.dataset, "train"), tokenizer, args)
        if len(train) < args.prompts_per_step:
            few = f"fewer than --prompts_per_step {args.prompts_per_step}"
            raise BadInput(f"{args.dataset} has {len(train)} usable prompts, {few}")
    source = args.eval_dataset or args.dataset
    held_out = []
    if args.eval_dataset or not args.dataset.lower().endswith(".jsonl"):
        held_out = add_prompts(load_rows(source, "test"), tokenizer, args)
    if not held_out:
        if args.eval_dataset or args.steps == 0:
            raise BadInput(f"{source} has no held-out problems: name some with --eval_dataset")
        say("no held-out problems, so no evaluation: name some with --eval_dataset")
    return train, held_out


def add_prompts(rows, tokenizer, args):
    """The rows whose prompt fits into --max_prompt_tokens, with its token ids as "prompt_ids"."""
    fitting = []
    prompts = encode_prompts(tokenizer, [row["question"] for row in rows], args)
    for row, ids in zip(rows, prompts):
        if 0 < len(ids) <= args.max_prompt_tokens:
            fitting.append(row | {"prompt_ids": ids})
    if len(fitting) < len(rows):
        count = f"{len(rows) - len(fitting)} of {len(rows)} prompts"
        say(f"dropped {count}, empty or longer than --max_prompt_tokens {args.max_prompt_tokens}")
    return fitting


class Run:
    """A run's folder: config.json, a copy of the script, metrics.jsonl, eval-*.jsonl, checkpoints.

    Rank 0 writes, and nothing before the first line of the log.
    """

    def __init__(self, args, script):
        """Claim the folder, or with --resume find the checkpoint to continue from."""
        self.args = args
        self.script = Path(script)
        self.folder = Path(args.output_dir or f"runs/{self.script.stem}")
        self.rank, self.processes = world()
        # No gradients in an evaluation: four times training's rows.
        self.eval_rows = 4 * args.prompts_per_step * args.group_size // self.processes
        check_flags(args, self.processes)
        self.config = {"script": self.script.stem, **vars(args), "date": PROMPT_DATE}
        for key in "model", "dataset", "eval_dataset":
            self.config[key] = portable(self.config[key])
        claimed = self.gather(self.claim() if self.rank == 0 else None)
        self.checkpoint, self.step, self.evaluation = claimed[0]
        self.first_step = self.step + 1
        self.file = None
        self.lines = {}  # of the evaluation file
        self.seconds = {}
        self.silent = 0  # steps in a row without any advantage
        self.skipped = 0  # steps in a row without a finite gradient

    def claim(self):
        """(checkpoint, step, name of the evaluation), or BadInput where the folder is not free."""
        if self.args.resume:
            try:
                old = dict(json.loads((self.folder / "config.json").read_text()))
            except FileNotFoundError as error:
                raise BadInput(f"--resume: there is no run in {self.folder}") from error
            except (OSError, TypeError, ValueError) as error:
                place = self.folder / "config.json"
                raise BadInput(f"--resume: cannot read {place}: {error}") from error
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        except BlockingIOError as error:
            raise BadInput(f"{self.folder} is in use: choose another --output_dir") from error
        except OSError as error:
            raise BadInput(f"cannot write to --output_dir {self.folder}: {error}") from error
        if not self.args.resume:
            if saved_steps(self.folder) or (self.folder / "metrics.jsonl").exists():
                how = "add --resume to continue it, choose another --output_dir, or delete it"
                raise BadInput(f"{self.folder} already contains a run: {how}")
            return None, 0, ""
        evaluation = self.compare(old)
        checkpoint, step = find_checkpoint(self.folder, self.args.steps > 0)
        if 0 < self.args.steps < step:
            raise BadInput(f"{self.folder} is at step {step}: give more --steps, or 0 to evaluate")
        return checkpoint, step, evaluation

    def compare(self, old):
        """Say what changed since the run was here last; returns the name of another evaluation."""
        changed = [key for key in self.config if self.config[key] != old.get(key)]
        for key in changed:
            change = f"--{key} changed: {old.get(key)} -> {self.config[key]}"
            if key in FIXED:
                other = f"the run in {self.folder} is another one ({change})"
                raise BadInput(f"--resume: {other}; choose another --output_dir")
            if self.args.steps > 0 and key not in ("resume", "output_dir"):
                say(change)
        script = self.folder / self.script.name
        if script.exists() and script.read_bytes() != self.script.read_bytes():
            say(f"{script} has been edited since")
        settings = EVALUATION
        if self.args.steps == 0:
            settings += ("temperature", "max_new_tokens")
        held_out = portable(self.args.eval_dataset or self.args.dataset)
        now = self.config | {"eval_dataset": held_out}
        other = [f"{key}-{now[key]}" for key in settings if key in changed]
        self.config |= {key: old.get(key) for key in EVALUATION}  # the run keeps its own
        return "-".join(other).replace("/", "_").replace(".jsonl", "")[-100:]

    def restore(self, optimizer):
        """The optimizer with the checkpoint's state, which --steps 0 does not read."""
        if self.checkpoint and self.args.steps > 0:
            optimizer.load_state_dict(load_state(self.checkpoint))
        return optimizer

    def begin(self, step):
        """Write config.json and a copy of the script; drop the lines of steps that come again."""
        if self.args.steps > 0 or not self.args.resume:
            replace_file(self.folder / "config.json", json.dumps(self.config, indent=2))
            replace_file(self.folder / self.script.name, self.script.read_text("utf-8"))
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text(errors="replace").splitlines() if metrics.exists() else []
        end = step if self.args.steps > 0 else math.inf
        kept = [line + "\n" for line in lines if logged_step(line) < end]
        replace_file(metrics, "".join(kept))
        self.file = open(metrics, "a", buffering=1)

    def steps(self):
        """The numbers of the steps to come, with a progress bar."""
        numbers = range(self.first_step, self.args.steps + 1)
        hidden = self.rank > 0 or not numbers
        self.bar = tqdm(
            numbers, self.folder.name, self.args.steps, initial=self.step, disable=hidden)
        for self.step in self.bar:
            self.clock = time.perf_counter()
            yield self.step
        how = "to continue, --resume with more --steps; to evaluate, --resume --steps 0"
        say(f"{self.folder} is at step {self.step}: {how}")

    def places(self, step):
        """The places of a step in the run, P numbers; with several processes, its share of them."""
        P = self.args.prompts_per_step
        return self.share(range((step - 1) * P, step * P))

    def share(self, items):
        return items[self.rank :: self.processes]

    def gather(self, value):
        """A list of every process' value."""
        values = [value] * self.processes
        if self.processes > 1:
            dist.all_gather_object(values, value)
        return values

    def total(self, number):
        return sum(self.gather(number))

    def means(self, values):
        """{name: mean} of tensors or numbers over all processes."""
        pairs = {}
        for name, x in values.items():
            x = torch.as_tensor(x, dtype=torch.float64)
            pairs[name] = (x.sum().item(), x.numel())
        means = {}
        for name, parts in zip(pairs, zip(*[part.values() for part in self.gather(pairs)])):
            means[name] = sum(total for total, _ in parts) / max(1, sum(n for _, n in parts))
        return means

    def token_means(self, sums, tokens):
        """{name: mean} over the tokens of all processes. A name may be missing in some: 0 there."""
        tokens = max(1, self.total(tokens))
        means = Counter()
        for part in self.gather(sums):
            means.update({name: x / tokens for name, x in part.items()})
        return dict(means)

    def tick(self, name):
        """Note the seconds since the last tick, to be logged as seconds_<name>."""
        now = time.perf_counter()
        self.seconds[f"seconds_{name}"] = now - self.clock
        self.clock = now

    def log(self, step, metrics, example=None):
        """A line of metrics.jsonl, and what is printed. A training step has (problem, batch)."""
        if not metrics:
            return  # no held-out problems
        if self.total(library["timeouts"]) and self.rank == 0:
            warnings.warn("verification timed out: the answer counts as wrong")
        if example is not None:
            metrics = metrics | self.seconds
        elif self.evaluation:  # not the run's own
            metrics = {"eval_dataset": self.evaluation} | metrics
        if self.rank == 0:
            if self.file is None:
                self.begin(step)
            line = {"step": step}
            for key, x in metrics.items():  # NaN is not JSON
                line[key] = None if isinstance(x, float) and not math.isfinite(x) else x
            self.file.write(json.dumps(line) + "\n")
        if example is None:
            shown = [f"{key} {x:.3f}" for key, x in metrics.items() if isinstance(x, float)]
            say(f"step {step}: " + "  ".join(shown))
        else:
            self.watch(step, metrics, *example)

    def watch(self, step, metrics, problem, batch):
        """Show a training step, warn about what must not go unnoticed, end a run that is broken."""
        keys = ("reward", "completion_len", "entropy", "degenerate_frac")
        self.bar.set_postfix({key: metrics[key] for key in keys})
        if step in (self.first_step, self.args.steps) or step % self.args.eval_every == 0:
            reward = f"reward {batch.rewards[0, 0]:.3g}"
            say(f"step {step}, {reward}: {problem['question']} | {batch.texts[0]}")
        if step == self.first_step:
            check_sampling(batch)
        self.silent = self.silent + 1 if metrics["grad_norm"] == 0 else 0
        self.skipped = 0 if math.isfinite(metrics["grad_norm"]) else self.skipped + 1
        if self.skipped > 0:
            say(f"step {step}: gradient not finite, update skipped ({self.skipped} in a row)")
        if self.skipped == 3 or not math.isfinite(metrics["sampling_logp_diff"]):
            raise BadInput("the model has diverged: lower --learning_rate, then --resume")
        if self.rank > 0:
            return
        if metrics["truncated_frac"] == 1:
            warnings.warn("every response was cut off before its end: raise --max_new_tokens")
        if self.silent == 20 or self.silent and step == self.args.steps:
            hint = "try easier or harder problems, or a larger --group_size"
            warnings.warn(f"steps in a row without any advantage: {self.silent}; {hint}")

    def add_samples(self, problems, batch, rewards):
        """Note responses for the evaluation file: one line for each problem."""
        n = rewards.shape[1]
        lengths = batch.mask.sum(1).tolist()
        for i, problem in enumerate(problems):
            line = {"question": problem["question"], "answer": problem.get("answer")}
            line |= {"samples": [], "rewards": [], "lengths": []}
            line = self.lines.setdefault(id(problem), line)  # it may have responses already
            line["samples"] += batch.texts[i * n : (i + 1) * n]
            line["rewards"] += rewards[i].tolist()
            line["lengths"] += lengths[i * n : (i + 1) * n]

    def save_samples(self):
        """Write eval-<step>.jsonl; returns the rewards, a list for each problem."""
        shares = self.gather([*self.lines.values()])
        lines = [line for row in zip_longest(*shares) for line in row if line]  # in their order
        self.lines = {}
        if self.rank == 0:
            name = f"eval-{self.step}-{self.evaluation}".removesuffix("-")
            text = "".join(json.dumps(line) + "\n" for line in lines)
            replace_file(self.folder / f"{name}.jsonl", text)
        return [line["rewards"] for line in lines]

    def save(self, step, model, tokenizer, optimizer):
        """Write checkpoint-<step>: a Hugging Face folder plus the optimizer's state. Keeps two."""
        if not is_finite(model):
            raise BadInput("the model has diverged: lower --learning_rate, then --resume")
        state = optimizer.state_dict()  # on all processes: it gathers
        if self.rank == 0:
            folder = self.folder / f"checkpoint-{step}"
            aside = self.folder / "checkpoint.tmp"  # renamed at the end: a kill damages nothing
            try:
                remove(aside)
                save_model(model, tokenizer, aside)
                torch.save(state, aside / "optimizer.pt")
                files = [file for file in aside.rglob("*") if file.is_file()]
                sizes = {str(file.relative_to(aside)): file.stat().st_size for file in files}
                (aside / "whole.json").write_text(json.dumps({"sizes": sizes}))
                remove(folder)  # an incomplete one of the same step
                aside.rename(folder)
            except Exception as error:  # OSError, and what safetensors and torch.save make of it
                remove(aside)
                rest = "earlier checkpoints are complete: make room, then --resume"
                raise BadInput(f"cannot save {folder}: {first_line(error)}; {rest}") from error
            older = [old for old in saved_steps(self.folder) if old <= step]
            for old in older[:-2]:
                remove(self.folder / f"checkpoint-{old}")
        self.gather(None)  # nobody goes on before it is saved


def replace_file(path, text):
    """Write a file aside and rename it: a kill leaves the old one or the new one."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def remove(folder):
    """Delete a folder, or the link to one; a warning where that is not possible."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"cannot remove {folder}: {error}")


def logged_step(line):
    """The step of a line of metrics.jsonl; infinity for half a line, which a kill leaves."""
    try:
        return int(json.loads(line)["step"])
    except (KeyError, TypeError, ValueError):
        return math.inf


def saved_steps(run):
    """The steps of the checkpoints in a run's folder, oldest first."""
    names = [path.name.removeprefix("checkpoint-") for path in Path(run).glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdecimal())  # not checkpoint-best


def is_complete(folder, with_state):
    """Whether the files of a checkpoint have their sizes, and can be read."""
    try:
        sizes = json.loads((folder / "whole.json").read_text())["sizes"]
        for file in folder.rglob("*.safetensors"):
            safe_open(file, "pt")  # reads the header: the right size may be all zeros
        for file in folder.rglob("*.json"):
            json.loads(file.read_text("utf-8"))
        if with_state:
            load_state(folder)
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except BadInput:
        raise
    except PermissionError as error:
        raise BadInput(f"cannot read {folder}: {error}") from error
    except Exception:  # a missing file, half a JSON text, zeros, code where weights should be
        return False


def load_state(folder):
    """The optimizer's state, mapped from its file: read where needed, shared by the processes."""
    path = folder / "optimizer.pt"
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise BadInput(f"not enough memory to read {path}: {first_line(error)}") from error


def find_checkpoint(run, with_state=True):
    """(folder, step) of the newest complete checkpoint, or (None, 0); prints which it skips."""
    for step in reversed(saved_steps(run)):
        folder = Path(run) / f"checkpoint-{step}"
        if is_complete(folder, with_state):
            say(f"continuing from {folder}")
            return folder, step
        say(f"{folder} is incomplete: skipped")
    say(f"{run} has no complete checkpoint: starting from step 0")
    return None, 0


def arg(default, help, at_least=-math.inf, at_most=math.inf):
    """A field of Args: a flag with its help text and bounds."""
    metadata = {"help": help.replace("%", "%%"), "bounds": (at_least, at_most)}
    return dataclasses.field(default=default, metadata=metadata)


def check_flags(args, processes):
    """Raise BadInput for a flag that is out of bounds or cannot be read."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        least, most = field.metadata.get("bounds", (-math.inf, math.inf))
        most = min(most, sys.maxsize) if field.type is int else most
        if isinstance(value, (int, float)) and not least <= value <= most:  # NaN too
            bound = f"at most {most}" if value > most else f"at least {least}"
            raise BadInput(f"--{field.name} must be {bound}, not {value}")
    if args.prompts_per_step % processes:
        raise BadInput(f"--prompts_per_step must be divisible by the {processes} processes")
    try:
        dict(json.loads(args.chat_template_kwargs))
    except (TypeError, ValueError) as error:
        raise BadInput(f"--chat_template_kwargs must be a JSON object: {error}") from error


class Parser(HfArgumentParser):
    """It reads a flag from each field of Args, with the field's metadata as options."""

    def add_argument(self, *names, bounds=None, **options):  # argparse knows no bounds
        if names[0].startswith("--no_"):
            options["help"] = f"switch --{names[0].removeprefix('--no_')} off"
        return super().add_argument(*names, **options)


def parse_args(Args, TINY, argv=None):
    """Args from the command line. Without --model, TINY replaces the defaults; given flags win."""
    parser = Parser(
        Args, allow_abbrev=False, usage="%(prog)s [--flag value ...]   (--help lists the flags)",
        description="Defaults are for a run with --model; without it TINY in the script applies.")
    given = parser.parse_known_args(argv)[0]
    if given.model is None:
        parser.set_defaults(**TINY)
    if given.lora_rank > 0:
        parser.set_defaults(learning_rate=10 * parser.get_default("learning_rate"))
    return Args(**vars(parser.parse_args(argv)))


def run_script(main, Args, TINY):
    """Parse the flags and run main; what goes wrong ends in one sentence."""
    args = parse_args(Args, TINY)
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace")  # where the console cannot show a character
    try:
        start_process(args.device)
        main(args)
    except KeyboardInterrupt:
        if world()[0] == 0:
            tqdm.write("interrupted: add --resume to continue from the last checkpoint", sys.stderr)
        sys.exit(130)
    except Exception as error:
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        known = full or isinstance(error, (BadInput, OSError))  # OSError: full disk
        if world()[0] > 0 or world()[1] > 1 and not known:
            time.sleep(5)  # if another process is the cause, torchrun ends this one meanwhile
        if not known:
            raise
        if full:
            error = "out of memory: lower --micro_batch_tokens or --group_size, or add --lora_rank"
        tqdm.write(f"error: {error}", sys.stderr)  # below the progress bar
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
