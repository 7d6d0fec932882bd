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
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from fractions import Fraction
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

# Must be set before torch is imported. The growing cache of a rollout otherwise strands tens of GB.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import peft  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from datasets import load_dataset  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor import distribute_tensor, init_device_mesh  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers import DynamicCache, HfArgumentParser, PreTrainedConfig, logging  # noqa: E402


class BadInput(ValueError):
    """Unusable input. The message is one sentence that says what to do; scripts exit with 2."""


def first_line(error):
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- models: loading, prompts, stop ids, checks at the start ---
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROOT = Path(__file__).resolve().parent
PEFT = "base_model.model."  # how peft's files begin the names of weights
PROMPT_DATE = datetime.date(2024, 7, 26)  # for templates that write today's date into the prompt


def locate(name):
    """The path of a model or dataset that is named relative to this file, else the name itself."""
    return str(ROOT / name) if not Path(name).exists() and (ROOT / name).exists() else str(name)


def load_model(name, device=None, trainable=True, lora_rank=0, seed=0):
    """Load a causal language model and its tokenizer from the hub or a local folder.

    float32 on CPU, bf16 on a GPU. Dropout is 0 in training mode too: the ratio must be 1 before the
    first update. With lora_rank only adapters, drawn from the seed, are trained. A checkpoint with
    adapters is loaded as its base model plus adapters. Raises BadInput if that is not possible.
    """
    device = find_device(device)
    adapters = Path(name, "adapters")
    config = None
    if adapters.is_dir():
        config = peft.LoraConfig.from_pretrained(adapters)
        name = config.base_model_name_or_path
        if trainable and config.r != lora_rank:
            raise BadInput(f"{adapters} has rank {config.r}: use --lora_rank {config.r}")
    elif trainable and lora_rank > 0:
        config = peft.LoraConfig(
            r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear",
            base_model_name_or_path=portable(name))  # fmt: skip
    with local_rank_0_first():
        model, tokenizer = load_pretrained(locate(name), DTYPES[device.type])
    model.to(device).requires_grad_(trainable)
    if config is not None:
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    if adapters.is_dir():
        weights = load_file(adapters / "adapter_model.safetensors")
        peft.set_peft_model_state_dict(model, {k.removeprefix(PEFT): v for k, v in weights.items()})
        model.requires_grad_(False) if not trainable else None
    return model.eval(), tokenizer


def find_device(name):
    """The torch.device of --device, by default CUDA where there is a GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every length: 30 ms/token on H100
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise BadInput(f"--device {name}: {first_line(error)}") from error
    if device.type not in DTYPES:
        raise BadInput(f"--device {name}: must be cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    return device


def load_pretrained(name, dtype):
    """A model on the CPU and its tokenizer, with what training needs set; see as_it_came."""
    logging.disable_progress_bar()  # only the bar for loading weights, not that of downloads
    is_path = name.startswith(("/", ".")) or name.count("/") > 1  # a hub name is owner/model
    if is_path and not Path(name).is_dir():
        raise BadInput(f"cannot load the model {name}: there is no such folder")
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        as_loaded = copy.deepcopy(config), tokenizer.pad_token
        nested = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
        for part in (config, *nested):
            for key, value in vars(part).items():  # attn_pdrop, layerdrop, router_jitter_noise, ...
                if ("drop" in key or "jitter" in key) and isinstance(value, float):
                    setattr(part, key, 0.0)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    except Exception as error:  # each library raises its own errors
        reason = first_line(error)
        raise BadInput(f"cannot load the model {name}, from a folder or the hub: {reason}") from error
    model.as_loaded = as_loaded
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token  # any token would do, since padding is masked
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows:
        raise BadInput(f"the tokenizer of {name} needs a pad or eos token that the model knows")
    return model, tokenizer


@contextlib.contextmanager
def as_it_came(model, tokenizer):
    """Undo the changes of load_pretrained while something is saved: they are not the model's."""
    now = model.config, tokenizer.pad_token
    model.config, tokenizer.pad_token = model.as_loaded
    try:
        yield
    finally:
        model.config, tokenizer.pad_token = now


def load_policy(name, args):
    """The model that --steps, --lora_rank and --gradient_checkpointing ask for; its tokenizer."""
    training = args.steps > 0
    model, tokenizer = load_model(name, args.device, training, args.lora_rank, args.seed)
    if training and args.gradient_checkpointing:
        try:
            model.activation_checkpointing_enable()
        except ValueError as error:
            name = type(model).__name__
            raise BadInput(f"{name} cannot recompute: use --no_gradient_checkpointing") from error
    return model, tokenizer


def load_reference(model, args):
    """The model that the run started from, frozen: not the checkpoint, also after a resume.

    With adapters it is a second tree of modules, without adapters, over the same base weights.
    """
    if args.steps == 0:
        return None
    if args.lora_rank == 0 or Path(args.model, "adapters").is_dir():
        return load_model(args.model, args.device, trainable=False)[0]
    reference = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, layer in list(reference.named_modules()):
        if isinstance(layer, LoraLayer):
            parent, _, child = name.rpartition(".")
            setattr(reference.get_submodule(parent), child, layer.base_layer)
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
            added = tokenizer.added_tokens_decoder.get(token)
            if added is not None and added.special:
                ids.add(token)
    return sorted(ids - {None})


def render(tokenizer, messages, args, **options):
    """A chat as text, by the tokenizer's template and the variables of --chat_template_kwargs."""
    options |= json.loads(args.chat_template_kwargs)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, strftime_now=PROMPT_DATE.strftime, **options)  # fmt: skip
    except Exception as error:  # raised by the template or its syntax
        raise BadInput(f"the tokenizer's chat template fails: {first_line(error)}") from error


def encode_prompts(tokenizer, questions, args):
    """Token ids of prompts: the chat template's, or "Question: ... Answer:" for a base model.

    A question is a text or a list of chat messages; --instruction is appended to it. The template
    writes its own BOS if it wants one, otherwise the tokenizer adds it: never both.
    """
    texts = []
    for question in questions:
        chat = as_chat(question)
        last = f"{chat[-1]['content']}\n{args.instruction}".strip()
        chat = [*chat[:-1], chat[-1] | {"content": last}]
        if tokenizer.chat_template:
            texts.append(render(tokenizer, chat, args, add_generation_prompt=True))
        else:
            texts.append("Question: " + "\n".join(turn["content"] for turn in chat) + "\nAnswer:")
    if not texts:
        return []
    prompts = tokenizer(texts, add_special_tokens=not tokenizer.chat_template).input_ids
    for ids in prompts:  # a tokenizer may append eos, after which there is nothing to answer
        while not tokenizer.chat_template and ids[-1] in tokenizer.all_special_ids:
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
def check_model(model, problems, args):
    """Raise BadInput at the start for what would fail, or be wrong, in the middle of a run."""
    name = type(model).__name__
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond it, log-probs depend on the rows beside
        context = rope["original_max_position_embeddings"]
    longest = max((len(problem["prompt_ids"]) for problem in problems), default=0)
    if context and longest + args.max_new_tokens > context:
        raise BadInput(
            f"--max_new_tokens {args.max_new_tokens} after a prompt of {longest} tokens exceeds the "
            f"model's context of {context}: lower it or --max_prompt_tokens")  # fmt: skip
    rows = model.get_input_embeddings().num_embeddings
    largest = max((max(problem["prompt_ids"]) for problem in problems), default=0)
    if largest >= rows:
        raise BadInput(f"a prompt contains token id {largest}, but {name} embeds only {rows} ids")
    # Beside the plain model what rollout does: here two columns of padding, and a cached token.
    ids = torch.arange(1, 9, device=model.device)[None]
    mask = (ids > 2).long()
    try:
        theirs = model(ids[:, 2:], use_cache=False).logits[0].float()  # (6, V)
        cache = DynamicCache(config=model.config)
        prompt = last_hidden_states(model, ids[:, :7], mask[:, :7], cache)[0, 2:]
        hidden = torch.cat([prompt, last_hidden_states(model, ids[:, 7:], mask, cache)[0]])
        ours = head_logits(model, hidden)
    except Exception as error:
        raise BadInput(f"{name} cannot be used here: {first_line(error)}") from error
    if not all(x.isfinite().all() for x in (ours, *model.parameters())):
        raise BadInput(f"the logits or weights of {args.model} are not finite: it is damaged")
    # Healthy models differ by at most 1e-4 of the spread in float32 and 0.02 in bf16.
    limit = theirs.std() * (1e-3 if model.dtype == torch.float32 else 0.3)
    if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= limit:  # or NaN
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
        raise BadInput(
            f"sampling and training disagree on log-probs by {mean:.2g}, {worst:.2g} in the worst "
            "response: this model's cache or padding does not work with rollout")  # fmt: skip


def as_chat(question):
    """A question, a text or already a list of chat messages, as such a list."""
    return [{"role": "user", "content": question}] if isinstance(question, str) else question


def check_rewards(rewards):
    """Raise BadInput for what compute_reward returned and is not a finite number."""
    for reward in rewards:
        try:
            finite = abs(reward) < float("inf")
        except TypeError:
            finite = False
        if not finite:
            raise BadInput(f"compute_reward returned {reward!r} instead of a finite number")


def check_shapes(advantages, weights, mask):
    """Raise BadInput for a result of the algorithm that has not the mask's shape, (B, T)."""
    named = {"compute_advantages": advantages, "compute_weights": weights}
    for name, x in named.items():
        if x.shape != mask.shape:
            shapes = f"{tuple(x.shape)} instead of the mask's {tuple(mask.shape)}"
            raise BadInput(f"{name} returned a tensor of shape {shapes}")


def save_model(model, folder):
    """Save in Hugging Face form, adapters merged in float32 without touching the live weights."""
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    merged = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".base_layer.weight"):
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            tensor = tensor.float() + layer.get_delta_weight("default").float()
        if "lora_" not in name:
            merged[name.replace(".base_layer", "")] = tensor
    model.save_pretrained(folder, state_dict=merged)
    model.peft_config["default"].save_pretrained(folder / "adapters")
    weights = peft.get_peft_model_state_dict(model)
    save_file({PEFT + name: x.contiguous() for name, x in weights.items()}, folder / "adapters/adapter_model.safetensors")


# --- the optimizer: float32 weights, and the processes of torchrun ---
def start_process(device):
    """Join the processes that torchrun started; nothing to do for a single one."""
    if "LOCAL_RANK" not in os.environ:
        return
    backend = "gloo"
    if find_device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # or all processes take the first GPU
        backend = "cpu:gloo,cuda:nccl"
    # Others wait while one decodes, verifies, downloads or saves, which may take long.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))


def world():
    """This process' number and how many there are: (0, 1) unless torchrun started several."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def local_rank_0_first():
    """One process per machine downloads; the others then find the files."""
    waits = dist.is_initialized() and os.environ["LOCAL_RANK"] != "0"
    if waits:
        dist.barrier()
    yield
    if dist.is_initialized() and not waits:
        dist.barrier()


class Float32AdamW:
    """AdamW on float32 copies of the trainable weights, sharded if there are several processes.

    In bf16, 1 + 1e-6 rounds to 1. The copies of float32 weights share their storage.
    """

    def __init__(self, model, args):
        self.max_grad_norm = args.max_grad_norm
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not self.weights:
            return  # --steps 0: there is nothing to train
        self.mesh = None
        if dist.is_initialized():
            self.mesh = init_device_mesh(self.weights[0].device.type, (dist.get_world_size(),))
        self.masters = [self.shard(weight.detach().float()) for weight in self.weights]
        self.grads = [None] * len(self.weights)  # whole, float32, summed over micro-batches
        for i, weight in enumerate(self.weights):
            hook = functools.partial(self.collect, i)
            weight.register_post_accumulate_grad_hook(hook)
        self.adamw = torch.optim.AdamW(self.masters, args.learning_rate, weight_decay=0, fused=True)
        self.copy_to_weights()  # rank 0's, so that all processes start alike

    def shard(self, tensor):
        """This process' part of a tensor, as a DTensor; the tensor itself for a single process."""
        return distribute_tensor(tensor, self.mesh, self.placements(tensor)) if self.mesh else tensor

    def placements(self, tensor):
        return [Shard(0) if tensor.ndim else Replicate()]

    def collect(self, i, weight):
        """Take a micro-batch's gradient as soon as it is complete, and free the model's."""
        if self.grads[i] is None:
            self.grads[i] = weight.grad.float()
        else:
            self.grads[i].add_(weight.grad)  # bf16 into float32, without a float32 copy of it
        weight.grad = None

    @torch.no_grad()
    def step(self, learning_rate, skip=False):
        """One update with the gradients so far; returns their norm, averaged over the processes.

        Nothing moves where the norm is not finite, or where all processes ask to skip: then the
        norm is 0. No collective runs before this, so processes may have unequal micro-batches.
        """
        grads = self.grads
        self.grads = [None] * len(grads)
        if self.mesh:  # decided together: one that skips alone would leave the others waiting
            everywhere = torch.tensor(float(skip), device=self.weights[0].device)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN)
            skip = everywhere.item() == 1
        if skip:
            return 0.0
        for master, weight, grad in zip(self.masters, self.weights, grads):
            if grad is None:  # the weight took no part
                grad = torch.zeros_like(weight, dtype=torch.float32)
            if self.mesh:  # a reduce-scatter: the mean over the processes, each keeps its shard
                grad = DTensor.from_local(grad, self.mesh, [Partial("avg")], run_check=False)
                grad = grad.redistribute(placements=self.placements(grad))
            master.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        norm = norm.full_tensor() if self.mesh else norm
        if norm.isfinite():
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.adamw.step()
            self.copy_to_weights()
        self.adamw.zero_grad()
        return norm.item()

    @torch.no_grad()
    def copy_to_weights(self):
        """Round the float32 weights into the model's."""
        for weight, master in zip(self.weights, self.masters):
            rounded = master.to(weight.dtype)  # first: half of what the all-gather moves
            weight.copy_(rounded.full_tensor() if self.mesh else rounded)

    def whole(self, tensor):
        """A sharded tensor on rank 0's CPU, None elsewhere. All processes must come here."""
        if not isinstance(tensor, DTensor):
            return tensor
        tensor = tensor.full_tensor()
        return tensor.cpu() if dist.get_rank() == 0 else None

    def state_dict(self):
        """The float32 weights and Adam's moments, gathered one tensor at a time to rank 0's CPU."""
        adamw = self.adamw.state_dict()
        adamw["state"] = {
            i: {name: self.whole(value) for name, value in state.items()}
            for i, state in adamw["state"].items()
        }
        return {"masters": [self.whole(master) for master in self.masters], "adamw": adamw}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Take over a saved state, also one of another number of processes."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(self.shard(saved.to(master.device)))
        for moments in state["adamw"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                # Copied, since the file that the state was mapped from may be deleted.
                moments[name] = self.shard(moments[name].to(self.weights[0].device, copy=True))
        self.adamw.load_state_dict(state["adamw"])
        self.copy_to_weights()


# --- log-probs and entropies ---
# Tokens whose logits exist at once. Measured on CPU at V = 32k: 64 and 256 are slower by 13 and 18 %.
# Not measured on a GPU: at V = 152k a chunk of logits is 622 MB, of which two or three exist.
CHUNK_TOKENS = {"cpu": 128, "cuda": 1024}
CHUNK_LOGITS = 2**22  # with a small vocabulary, as many tokens as make this many logits


def last_hidden_states(model, ids, attention_mask, cache=None):
    """The decoder's output (b, s, H) for ids (b, s); the mask also covers what the cache holds."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # left padding shifts no position
    return model.get_decoder()(
        input_ids=ids, attention_mask=attention_mask, position_ids=positions[:, -ids.shape[1] :],
        cache=cache, use_cache=cache is not None).last_hidden_state  # fmt: skip


def scale_and_cap(model):
    """What the model's family does to the head's output: cap * tanh(scale * x / cap)."""
    config = model.config.get_text_config()
    scale = 1 / (getattr(config, "logits_scaling", None) or 1)
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(config, name, None) or 1
    return scale, getattr(config, "final_logit_softcapping", None)


def project(hidden, weight, bias, scale, cap):
    """Logits (n, V) of hidden states (n, H): factors in the model's precision, float32 sums."""
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


def head_logits(model, hidden):
    """The model's logits (n, V) in float32 for hidden states (n, H)."""
    head = model.get_output_embeddings()
    return project(hidden, head.weight, head.bias, *scale_and_cap(model))


def next_token_logits(model, ids, attention_mask, cache):
    """Logits (b, V) for the token after ids (b, s)."""
    return head_logits(model, last_hidden_states(model, ids, attention_mask, cache)[:, -1])


class ChunkedLogps(torch.autograd.Function):
    """log p(target) and the entropy of p = softmax(z), where z = cap * tanh(scale * x / cap) and
    x = hidden @ weight.T + bias. No (N, V) tensor exists: backward recomputes z, chunk by chunk.

    With g = dL/dlogp:
        logp = z[target] - log sum_v exp(z_v)           so  dL/dz_v = g (1[v = target] - p_v)
        dz/dx = scale, with a cap scale (1 - (z/cap)^2)  so  dL/dx = dL/dz dz/dx
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
        # Summed in float32, since bf16 would round once per chunk: for the head one (V, H) buffer,
        # 1.2 GB at V = 152k and H = 2,048. A frozen head costs nothing.
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        g = g[:, None] * ctx.scale  # (N, 1)
        for c in ctx.chunks:
            z = project(hidden[c], weight, bias, ctx.scale, ctx.cap)  # (n, V)
            slope = None if ctx.cap is None else 1 - (z / ctx.cap) ** 2
            # In z's memory: torch.softmax reads each element before it writes it.
            dx = torch.softmax(z, -1, out=z).mul_(-g[c]).scatter_add_(-1, targets[c, None], g[c])
            if ctx.cap is not None:
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
    """Log-probs of the last completion_len tokens under softmax(logits / temperature), and the
    entropies of that distribution over the whole vocabulary: both (B, T) float32, the entropies
    without gradient.

    The (B, T, V) logits never exist: the head works on a chunk of tokens at a time, and again in
    backward.
    """
    targets = input_ids[:, -completion_len:]  # (B, T)
    # Position t predicts token t + 1, so the last one is not needed.
    hidden = last_hidden_states(model, input_ids[:, :-1], attention_mask[:, :-1])
    hidden = hidden[:, -completion_len:].flatten(0, 1)  # (B T, H)
    head = model.get_output_embeddings()
    scale, cap = scale_and_cap(model)
    cap = cap if cap is None else cap / temperature  # a cap on logits / temperature
    logps, entropies = ChunkedLogps.apply(
        hidden, head.weight, head.bias, targets.flatten(), scale / temperature, cap)  # fmt: skip
    return logps.view(targets.shape), entropies.view(targets.shape)


# --- the verifier ---
# README.md has the table of what counts as equal. The cheap checks come first: integers, then equal strings after the
# same rewriting of gold and answer, exact fractions, and lists item by item. Only what is left goes to the math-verify
# library, in a process of its own. Model text is never evaluated, and it is cut before anything slow.
MAX_CHARS = 500  # a longer answer is no answer; the longest gold of GSM8K, MATH-500, AMC, AIME and Minerva has 91
MAX_DEPTH = 12  # brackets inside brackets: the library's parser takes minutes over deep nesting
TOLERANCE = Fraction(1, 10**6)  # relative, and for decimals only: 0.3333333 is 1/3, 0.333 is not
LIMIT = 1.3  # wall-clock seconds that one verdict may spend in the library; most take 0.02 to 0.2
OR = " ||| "  # between the alternatives of a gold that has several
INTEGER = re.compile(r"-?[0-9]{1,500}")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The number after ####, if it is not the front of something else: 42 eggs is 42, but 10^6 is not 10.
HASHES = re.compile(r"[\s*$]*([+-]?\$?[0-9.][0-9,./]*)(?![0-9,./^]|[-:e][0-9])")
SYMBOLS = {"−": "-", "°": r"^\circ", "×": r"\times ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup "}
# Words that change a number, take it back or offer another, so that they are no unit: 2 million, 18 \text{ is wrong}.
NO_UNIT = (r"(?!.*\b(?:not?|or|and|is|wrong|hundred|thousand|(?:[mbtr]+|quadr)illion|dozen|sin|cos|tan|log|exp"
          r"|squared|cubed|hal(?:f|ves)|thirds?|quarters?|tenths?|plus|minus|times|less|factorial|incorrect|nope)\b)")
REWRITES = [  # in this order
    (r"√ ?(\d+|\w)", r"\\sqrt{\1}"),
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\! ?", ""),  # \left( is (
    (r"\\?[$%]|\\[()]", ""),  # currency and percent are units: 28 \% is 28, and so it is not 0.28
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~|\s+", " "),  # 2\,000 is 2 000; the \\ that ends a matrix' row stays
    (r"\{,\}", ","),  # 1{,}234 is 1,234
    (r",? ?\\text\{,? ?(?:and|or) ?\} ?|,? (?:and|or) |, ", ";"),  # 1, 234 is two numbers, 1,234 is one
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(frac|sqrt) ?(\w)", r"\\\1{\2}"),  # \frac12 is \frac{1}2
    (r"(\\frac\{[^{}]*\}) ?(\w)", r"\1{\2}"),  # \frac{1}2 is \frac{1}{2}
    (r"\^ ?\{? ?\\circ ?\}?(?: ?[CF]$)?", ""),  # 90^{\circ} is 90
    (r"\\mathrm\{(\w)\}", r"\1"),  # \mathrm{e} is e
    (r"([_^])\{(\w)\}", r"\1\2"),  # x^{2} is x^2
    (r"[.,;\s]+$", ""),  # 42. is 42
    (r"(?<=[\w})]) ?" + NO_UNIT + r"\\(?:text|mbox|mathrm)\{[a-zA-Z /.^-]*\}(?:\^\{?-?\d\}?)?$", ""),  # 15\mbox{ cm}^2
    (r"(?<=[\d}]) " + NO_UNIT + r"\(?(?:[a-zA-Z]{3,}|[ckm]m|kg|Hz)[a-zA-Z /]*\)?$", ""),  # 18 eggs, 9 (apples)
    (r"^\\(?:text|textbf|mbox|mathrm)\{([^{}]*)\}$", r"\1"),  # \text{even} is even
    (r"^ *\(([A-Z])\)\.?$", r"\1"),  # (B) is B
    (r"^\\\{(.*)\\\}$", r"\1"),  # the set \{1, 2\} is the list 1, 2
    (r"(?<!\w) | (?!\w)", ""),  # x - 1 is x-1; the space in 9 9 or \pi r has a meaning
    (r"^([^,;]*)\\pm([^,;]*)$", r"\1+\2;\1-\2"),  # 1 \pm \sqrt{2} is two numbers
]
NUMBER = re.compile(r"[+-]? ?(?:(?:\d+ )?\d+/0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)", re.ASCII)  # 1 1/2
GROUPS = re.compile(r"[+-]?\d{1,3}(?:[, ]\d{3})+(?:\.\d*)?")  # 1,234.50
# The front of x=5, x_1=5, f(x)=2x, \theta=5, (x,y)=(1,2) and x\in[1,2]
SYMBOL = r"(?:[A-Za-z]|\\[a-z]+)(?:_\w)?(?:\([a-z]\))?|\([a-z][,;][a-z]\)"
SYMBOL = re.compile(rf"(?:^|(?<=[,;]))(?:{SYMBOL})(?:=|\\in(?![a-z]))")
RELATION = re.compile(r"[=<>]|\\(?:[lg]eq?|neq?|equiv|approx|sim|cong|in|to|propto)(?![a-z])")
MISREAD = re.compile(  # what the library gets wrong if it is asked
    r"[^ -~]|[?#@:\"]|\\text|\\mbox"  # it drops what it cannot read
    r"|\d(?:[ \[\]]|\\[{}])+\d|(?<![a-zA-Z}\]_^\\])\{"  # it adds up neighbours: 9 9 and {9}{9} are 18
    r"|\d[_']|\d[eE][+-]?\d|\d [a-zA-Z]{2}"  # it drops the base of 52_8, and reads 3e8 as 3·e·8
    r"|^[a-zA-Z]+$|(?<![a-zA-Z\\{])[a-zA-Z]{4}"  # words are products to it: listen is silent
)


def last_answer(completion):
    """The content of the last box, else the number right after the last ####, else None."""
    boxes = list(BOX.finditer(completion))
    if not boxes:
        hashes = HASHES.match(completion.rpartition("####")[2][:MAX_CHARS]) if "####" in completion else None
        return hashes[1] if hashes else None
    depth, body = 1, completion[boxes[-1].end() :][: MAX_CHARS + 1]
    for brace in re.finditer(r"\\.|[{}]", body, re.DOTALL):  # \\. steps over \{ and \}, which are no groups
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return body[: brace.start()].strip() or None
    return None  # never closed: the completion was cut off there, and an earlier box was not its last word


def rewrite(text):
    """One spelling for all the spellings of an answer."""
    text = text.translate(str.maketrans(SYMBOLS))
    for pattern, new in REWRITES:
        text = re.sub(pattern, new, text.strip())
    return text.lower() if re.fullmatch(r"[A-Za-z][A-Za-z' -]+", text) else text  # Evelyn is evelyn, but B is not b


def number(text):
    """(exact value, whether it is a decimal fraction), or None."""
    text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2", text).strip()  # -1\frac{1}{2} is -1 1/2
    text = re.sub(r"^([+-]?)10\^", r"\g<1>1\\times 10^", text)  # 10^{-3} is 1\times 10^{-3}
    text = re.sub(r"(?:\\times|\\cdot) ?10\^\{?([+-]?\d+)\}?$", r"e\1", text)  # 3\times 10^8 is 3e8
    text = re.sub("[, ]", "", text) if GROUPS.fullmatch(text) else text
    if not NUMBER.fullmatch(text):
        return None
    value = sum(map(Fraction, text.lstrip("+-").split()))
    return -value if text[0] == "-" else value, value.denominator > 1 and ("." in text or "e" in text)


def split(text):
    """The text cut at its outermost commas; None if its brackets do not match or go too deep."""
    depth, items = 0, [""]
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if not 0 <= depth <= MAX_DEPTH:
            return None
        if char in ",;" and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items if depth == 0 else None


def same(gold, text):
    """Whether two rewritten answers are equal. They are not interchangeable: the gold says which form is asked for."""
    if gold == text:
        return True
    a, b = number(gold), number(text)
    if a and b:  # exactly, unless one is a decimal fraction
        return a[0] == b[0] or (a[1] or b[1]) and abs(a[0] - b[0]) <= TOLERANCE * abs(a[0])
    if bool(RELATION.search(gold)) != bool(RELATION.search(text)):  # x=5 is 5, but 17=18 is neither 17 nor 18
        values = SYMBOL.sub("", gold), SYMBOL.sub("", text)
        return values != (gold, text) and same(*values)
    golds, texts = split(gold), split(text)
    if not golds or not texts or len(golds) != len(texts):
        return False  # this stops spraying: 41,42 is not 42
    if len(golds) > 1:
        missed = [item for item in golds if item not in texts and not any(same(item, other) for other in texts)]
        extra = [other for other in texts if other not in golds and not any(same(item, other) for item in golds)]
        return not missed and not extra  # in any order
    golds, texts = split(gold[1:-1]), split(text[1:-1])
    if gold[:1] in ("(", "[") and golds and texts and len(golds) > 1:  # a point or an interval: in this order
        return gold[0] + gold[-1] == text[:1] + text[-1:] and len(golds) == len(texts) and all(map(same, golds, texts))
    return not MISREAD.search(gold) and not MISREAD.search(text) and library_equal(gold, text)


def library_worker():
    """Runs in a process of its own, from its source, so that nothing of the caller's is imported there. Each question
    goes to a forked child: the kernel ends one that runs out of time, whatever it is doing. Exit status 42 is yes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # by default an alarm kills
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    latex = [LatexExtractionConfig()]  # no other extraction: it pays any last number
    read = functools.partial(parse, extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)
    verify(read(r"$(x+1)^2$"), read(r"$x^2+2x+\sqrt{1}$"), timeout_seconds=None)  # loads what all children need
    os.write(1, b"r")  # ready
    for line in sys.stdin:  # ends when the caller does, however that ends
        if os.fork() > 0:
            status = os.waitstatus_to_exitcode(os.wait()[1])
            os.write(1, {42: b"1", -signal.SIGALRM: b"t"}.get(status, b"0"))  # an error or a crash is not equal
            continue
        gold, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        gold, text = read(f"${gold}$"), read(f"${text}$")
        equal = gold and text and verify(gold, text, timeout_seconds=None)
        if equal and all(getattr(side[0], "is_number", False) for side in (gold, text)):
            a, b = gold[0].doit(), text[0].doit()  # once more: the library takes 10^{-20} for 10^{-30}
            equal = a == b if a.is_Rational and b.is_Rational else abs((a - b).evalf(30)) <= 1e-6 * abs(a.evalf(30))
        os._exit(42 if equal else 0)


# The source is read now, since the file may be edited during a run.
WORKER = f"import functools, json, os, signal, sys\n{inspect.getsource(library_worker)}\nlibrary_worker()"
library = {"process": None, "timeouts": 0}
start_lock, question_lock = threading.Lock(), threading.Lock()
budget = threading.local()  # .seconds that this thread's verdict may still wait for the library


@functools.lru_cache(maxsize=10_000)
def library_equal(gold, text):
    """Asks the worker, one question at a time. Raises TimeoutError, which the cache does not keep."""
    asked = time.monotonic()
    with start_lock:  # starting takes a second
        if library["process"] is None or library["process"].poll() is not None:
            command = [sys.executable, "-c", WORKER]
            library["process"] = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            if library["process"].stdout.read(1) != b"r":
                raise RuntimeError("the verifier's process did not start; is math-verify installed?")
    # A verdict that had to wait for the start has less time left for its question: two seconds in all.
    budget.seconds = min(budget.seconds, max(0.3, 1.8 - (time.monotonic() - asked)))
    worker, end, reply = library["process"], time.monotonic() + budget.seconds, b""
    if not question_lock.acquire(timeout=max(0, budget.seconds)):
        raise TimeoutError
    try:
        question = [gold.replace(";", ","), text.replace(";", ","), max(0.001, end - time.monotonic())]
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        reply = worker.stdout.read(1)
    except BrokenPipeError:
        pass
    finally:
        budget.seconds = end - time.monotonic()
        if not reply:  # somebody killed it; or Ctrl-C came, and the next question must not get this one's reply
            worker.kill()
            worker.wait()
        question_lock.release()
    if reply == b"t":
        raise TimeoutError
    return reply == b"1" if reply else library_equal(gold, text)  # asks a new worker


def verify_timeouts():
    """How many verdicts ran out of time so far. Each earned 0; many of them mean a busy machine or a hostile policy."""
    return library["timeouts"]


def gold_answer(raw):
    """The dataset's answer column as the string that verify compares with; BadInput if no answer could ever match it.
    27.0 is 27; of a solution the last box counts, else what stands after ####; a list holds alternatives."""
    if isinstance(raw, str) and OR in raw:
        raw = raw.split(OR)
    if isinstance(raw, list) and raw:
        return OR.join({rewrite(gold): gold for gold in map(gold_answer, raw)}.values())
    text = str(int(raw) if isinstance(raw, float) and raw.is_integer() else raw).strip()
    if INTEGER.fullmatch(text):
        return text
    if BOX.search(text) or "####" in text:
        text = last_answer(text) or ""
    prose = len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", text[:MAX_CHARS])) > 8  # a solution in words, without ####
    whole = last_answer(rf"\boxed{{{text}}}") == text  # not too long, and its braces close
    empty = text.lower() in ("nan", "none", "inf", "-inf") or whole and not re.search(r"\w", rewrite(text))
    if type(raw) not in (str, int, float) or prose or empty or not whole:
        raise BadInput(f"the gold {str(raw)[:60]!r} has no answer that can be read")
    return text


def verify(completion: str, answer: str) -> float:
    """1.0 if the completion's last box, else the number after its last ####, equals the answer, else 0.0."""
    gold = gold_answer(answer)
    text = last_answer(completion) if isinstance(completion, str) else None
    if text is None:
        return 0.0
    if INTEGER.fullmatch(text) and INTEGER.fullmatch(gold):
        return float(int(text) == int(gold))
    budget.seconds = LIMIT
    try:
        golds, text = [rewrite(one) for one in gold.split(OR)], rewrite(text)
        return float(text in golds or any(same(one, text) for one in golds))
    except TimeoutError:
        library["timeouts"] += 1
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
# With another one of these, a resume would not be the same run; other flags may change.
FIXED = """script model dataset instruction chat_template_kwargs date seed lora_rank prompts_per_step
    group_size max_prompt_tokens""".split()
EVALUATION = ("eval_dataset", "eval_temperature", "eval_problems", "eval_samples")


def say(text):
    """Print a line above the progress bar, once for all processes."""
    if world()[0] == 0:
        tqdm.write(text)


def load_rows(source, split):
    """The rows of a split as dicts with all their columns, "question" and "answer" filled in.

    The question is the column question, problem or prompt: a text, or a list of chat messages; the
    answer is answer or solution, else None. An empty list where a test split does not exist.
    Raises BadInput, naming the file and line, for what cannot be read.
    """
    if split == "test":
        source, split = BENCHMARKS.get(source, (source, split))
    path = Path(locate(source))
    if path.is_dir():
        path = path / f"{split}.jsonl"
        if split == "test" and not path.exists() and path.with_name("train.jsonl").exists():
            return []
    name, _, config = source.partition(":")
    if name == "openai/gsm8k":
        config = config or "main"
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
            with local_rank_0_first():
                rows = list(load_dataset(name, config or None, split=split))
    except Exception as error:  # each library raises its own errors
        if split == "test" and "Unknown split" in str(error):
            return []
        raise BadInput(f"cannot read the dataset {place}: {first_line(error)}") from error
    columns = list(rows[0]) if rows else []
    column = next((name for name in ("question", "problem", "prompt") if name in columns), None)
    if column is None:
        raise BadInput(f"{path} has {len(rows)} rows of {columns}; needed: question|problem|prompt")
    for number, row in enumerate(rows, 1):
        row["question"] = row.get(column)
        row.setdefault("answer", row.get("solution"))
        try:
            chat = as_chat(row["question"])
            assert chat[-1]["content"].encode().strip()  # a lone surrogate cannot be encoded
        except (AssertionError, KeyError, TypeError, IndexError, AttributeError, UnicodeError) as error:
            shown = f"{column} {str(row['question'])[:60]!r}"
            raise BadInput(f"{path}, {split} row {number}: {shown} is not text: {error}") from error
    return rows


def readable_golds(rows, source):
    """The rows with an answer that verify can read; BadInput where it cannot for a tenth of them."""
    readable = []
    reasons = []
    for number, row in enumerate(rows, 1):
        try:
            readable.append(row | {"answer": gold_answer(row["answer"])})
        except BadInput as error:
            reasons.append(f"row {number}: {error}")
    if reasons:
        message = f"{source}: {len(reasons)} of {len(rows)} rows lack a readable answer ({reasons[0]})"
        if len(reasons) * 10 >= len(rows):
            raise BadInput(f"{message}; needed: a column answer or solution, columns: {list(rows[0])}")
        say(f"{message}: dropped")
    return readable


def add_prompts(rows, tokenizer, args):
    """The rows whose prompt fits into --max_prompt_tokens, with its token ids as "prompt_ids"."""
    fitting = []
    prompts = encode_prompts(tokenizer, [row["question"] for row in rows], args)
    for row, ids in zip(rows, prompts):
        if len(ids) <= args.max_prompt_tokens:
            fitting.append(row | {"prompt_ids": ids})
    if len(fitting) < len(rows):
        count = f"{len(rows) - len(fitting)} of {len(rows)} prompts"
        say(f"dropped {count}, longer than --max_prompt_tokens {args.max_prompt_tokens}")
    return fitting


def load_splits(tokenizer, args):
    """Training rows (none with --steps 0) and held-out rows, each with its "prompt_ids"."""
    source = args.eval_dataset or args.dataset
    train = load_rows(args.dataset, "train") if args.steps > 0 else []
    held_out = []
    if args.eval_dataset or not args.dataset.lower().endswith(".jsonl"):
        held_out = load_rows(source, "test")
    if not held_out:
        if args.eval_dataset or args.steps == 0:
            raise BadInput(f"{source} has no held-out problems: name some by --eval_dataset")
        say("no held-out problems, so no evaluation: name some by --eval_dataset")
    train = add_prompts(train, tokenizer, args)
    if 0 < args.steps and len(train) < args.prompts_per_step:
        few = f"fewer than --prompts_per_step {args.prompts_per_step}"
        raise BadInput(f"{args.dataset} has {len(train)} usable prompts, {few}")
    return train, add_prompts(held_out, tokenizer, args)


def arg(default, help, at_least=None, at_most=None):
    """A field of Args: a flag, its help text and its bounds."""
    bounds = {"help": help, "at_least": at_least, "at_most": at_most}
    return dataclasses.field(default=default, metadata=bounds)


class Run:
    """A run's folder: config.json, a copy of the script, metrics.jsonl, eval-*.jsonl, checkpoints.

    Nothing in it changes before the first line is logged. With several processes each has a share
    of the prompts, and rank 0 writes.
    """

    def __init__(self, args, script):
        """Claim the folder, or with --resume find the checkpoint to continue from."""
        self.args = args
        self.script = Path(script)
        self.folder = Path(args.output_dir or f"runs/{self.script.stem}")
        self.rank, self.processes = world()
        self.check_flags()
        self.config = {"script": self.script.stem, **vars(args), "date": str(PROMPT_DATE)}
        for key in "model", "dataset", "eval_dataset":
            self.config[key] = portable(self.config[key])
        found = [self.claim() if self.rank == 0 else None]
        if self.processes > 1:
            dist.broadcast_object_list(found)
        self.checkpoint, self.step, self.evaluation = found[0]
        self.first_step = self.step + 1
        self.file = None
        self.lines = []
        self.seconds = {}
        self.silent = 0  # steps in a row without a signal
        self.skipped = 0  # steps in a row without a finite gradient

    def check_flags(self):
        """Raise BadInput for a flag outside its bounds."""
        for field in dataclasses.fields(self.args):
            value = getattr(self.args, field.name)
            least, most = field.metadata["at_least"], field.metadata["at_most"]
            if value is not None and least is not None and not value >= least:  # also for NaN
                raise BadInput(f"--{field.name} must be at least {least}, not {value}")
            if value is not None and most is not None and not value <= most:
                raise BadInput(f"--{field.name} must be at most {most}, not {value}")
        if self.args.prompts_per_step % self.processes:
            message = f"must be divisible by the number of processes, {self.processes}"
            raise BadInput(f"--prompts_per_step {self.args.prompts_per_step} {message}")
        try:
            dict(json.loads(self.args.chat_template_kwargs))
        except (TypeError, ValueError) as error:
            raise BadInput(f"--chat_template_kwargs must be a JSON object: {error}") from error

    def claim(self):
        """(checkpoint, its step, name of the evaluation) after checking that the folder is free."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        except BlockingIOError as error:
            raise BadInput(f"{self.folder} is in use: choose another --output_dir") from error
        except OSError as error:
            raise BadInput(f"cannot write to --output_dir {self.folder}: {error}") from error
        if not self.args.resume:
            if checkpoints(self.folder) or (self.folder / "metrics.jsonl").exists():
                add = "add --resume to continue it, or choose another --output_dir"
                raise BadInput(f"{self.folder} already contains a run: {add}")
            return None, 0, ""
        try:
            old = dict(json.loads((self.folder / "config.json").read_text()))
        except FileNotFoundError as error:
            raise BadInput(f"--resume: there is no run in {self.folder}") from error
        except (TypeError, ValueError) as error:
            raise BadInput(f"--resume: cannot read {self.folder}/config.json: {error}") from error
        changed = {}
        for key, new in self.config.items():
            if old.get(key) != new and key not in ("resume", "output_dir", "device"):
                changed[key] = f"{old.get(key)} -> {new}"
        if not changed.keys().isdisjoint(FIXED):
            message = f"the run in {self.folder} is another one ({changed})"
            raise BadInput(f"--resume: {message}; choose another --output_dir")
        if self.args.steps > 0:
            for key, change in changed.items():
                say(f"--{key} changed: {change}")
            copy = self.folder / self.script.name
            if copy.exists() and copy.read_text() != self.script.read_text():
                say(f"{self.script.name} was edited: the run's copy of it is replaced")
        other = [Path(str(getattr(self.args, key))).stem for key in EVALUATION if key in changed]
        for key in EVALUATION:  # the run's own evaluation stays what it was
            self.config[key] = old.get(key)
        checkpoint, step = find_checkpoint(self.folder, self.args.steps > 0)
        if 0 < self.args.steps < step:
            raise BadInput(f"{self.folder} is at step {step}: --steps must be more, or 0 to evaluate")
        return checkpoint, step, "-".join(other)

    def restore(self, optimizer):
        """The optimizer with the checkpoint's state; with --steps 0 that state is not read."""
        if self.checkpoint and self.args.steps > 0:
            optimizer.load_state_dict(load_state(self.checkpoint))
        return optimizer

    def begin(self):
        """Drop what was logged after the checkpoint; write config.json and a copy of the script."""
        metrics = self.folder / "metrics.jsonl"
        kept = []
        for line in metrics.read_text().splitlines() if self.checkpoint else []:
            if not line.endswith("}") or json.loads(line)["step"] >= self.first_step:
                break  # these steps come again; a kill can leave half a line
            kept.append(line + "\n")
        replace_file(metrics, "".join(kept))
        if self.args.steps > 0 or not self.args.resume:
            replace_file(self.folder / "config.json", json.dumps(self.config, indent=2))
            replace_file(self.folder / self.script.name, self.script.read_text())
        self.file = open(metrics, "a", buffering=1)

    def steps(self):
        """The numbers of the steps to come, with a progress bar."""
        self.bar = tqdm(
            range(self.first_step, self.args.steps + 1), self.folder.name, self.args.steps,
            initial=self.step, disable=self.rank > 0)  # fmt: skip
        for self.step in self.bar:
            self.clock = time.perf_counter()
            yield self.step
        say(f"{self.folder}: metrics.jsonl, eval-*.jsonl, checkpoint-*. Continue with --resume "
            "--steps N, or evaluate with --resume --steps 0")  # fmt: skip

    def places(self, step):
        """The places of a step in the run, P numbers; with several processes, its share of them."""
        P = self.args.prompts_per_step
        return self.share(range((step - 1) * P, step * P))

    def share(self, items):
        return items[self.rank :: self.processes]

    def gather(self, items):
        """The opposite of share: the lists of all processes as one list, in the original order."""
        parts = [items]
        if self.processes > 1:
            parts = [None] * self.processes
            dist.all_gather_object(parts, items)
        whole = [None] * sum(map(len, parts))
        for i, part in enumerate(parts):
            whole[i :: self.processes] = part
        return whole

    def total(self, value):
        """The sum of a number over all processes."""
        return sum(self.gather([value]))

    def mean(self, values, count=1):
        """The mean of a tensor over all processes, or of a number that is the sum of count ones."""
        if torch.is_tensor(values):
            count = values.numel()
            values = values.double().sum().item()
        return self.total(values) / max(1, self.total(count))

    def tick(self, name):
        """Note the seconds since the last tick, to be logged as seconds_<name>."""
        now = time.perf_counter()
        self.seconds[f"seconds_{name}"] = now - self.clock
        self.clock = now

    def log(self, step, metrics, example=None):
        """Write metrics as a line of metrics.jsonl, and print them; example is (problem, batch)."""
        if not metrics:
            return
        if example is not None:
            metrics = metrics | self.seconds
        elif self.evaluation:
            metrics = {"eval_dataset": self.evaluation} | metrics
        if self.rank == 0:
            if self.file is None:
                self.begin()
            finite = {key: x if is_finite(x) else None for key, x in metrics.items()}
            self.file.write(json.dumps({"step": step} | finite) + "\n")
        if example is None:
            shown = [f"{key} {x:.3f}" for key, x in metrics.items() if isinstance(x, float)]
            say(f"step {step}: " + "  ".join(shown))
            return
        keys = "reward", "completion_len", "entropy", "degenerate_frac"
        self.bar.set_postfix({key: metrics[key] for key in keys})
        if step in (self.first_step, self.args.steps) or step % self.args.eval_every == 0:
            problem, batch = example
            reward = f"reward {batch.rewards[0, 0]:.3g}"
            say(f"step {step}, {reward}: {problem['question']} | {batch.texts[0]}")
        if step == self.first_step:
            check_sampling(example[1])
        self.watch(step, metrics)

    def watch(self, step, metrics):
        """Say what must not pass in silence, and end a run that is broken."""
        self.silent = self.silent + 1 if metrics["grad_norm"] == 0 else 0
        self.skipped = 0 if is_finite(metrics["grad_norm"]) else self.skipped + 1
        if self.skipped > 0:
            say(f"step {step}: the gradient is not finite, update skipped ({self.skipped} in a row)")
        if self.skipped == 3 or not is_finite(metrics["sampling_logp_diff"]):
            raise BadInput("the model has diverged: lower --learning_rate, then --resume")
        if self.rank > 0:
            return
        if metrics["truncated_frac"] == 1:
            warnings.warn("every response was cut off before its end: raise --max_new_tokens")
        if self.silent == 20 or self.silent and step == self.args.steps:
            hint = "try easier or harder problems, or a larger --group_size"
            warnings.warn(f"{self.silent} steps without any advantage: {hint}")
        if verify_timeouts():
            warnings.warn("verification timed out: the answer counts as wrong")

    def add_samples(self, problems, batch, rewards):
        """Note responses for the evaluation file; those to a problem seen before join its line."""
        lengths = batch.mask.sum(1).view(rewards.shape).tolist()
        for i, problem in enumerate(problems):
            if not self.lines or self.lines[-1][0] is not problem:
                line = {"question": problem["question"], "answer": problem["answer"]}
                self.lines.append((problem, line | {"samples": [], "rewards": [], "lengths": []}))
            line = self.lines[-1][1]
            n = rewards.shape[1]
            line["samples"] += batch.texts[i * n : (i + 1) * n]
            line["rewards"] += rewards[i].tolist()
            line["lengths"] += lengths[i]

    def save_samples(self):
        """Write eval-<step>.jsonl; returns the rewards, one list per problem of all processes."""
        lines = self.gather([line for _, line in self.lines])
        self.lines = []
        if self.rank == 0:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            name = "-".join(filter(None, ["eval", str(self.step), self.evaluation]))
            replace_file(self.folder / f"{name}.jsonl", text)
        return [line["rewards"] for line in lines]

    def save(self, step, model, tokenizer, optimizer):
        """Write checkpoint-<step>; see write_checkpoint."""
        state = optimizer.state_dict()  # on all processes: it gathers
        if self.rank == 0:
            write_checkpoint(self.folder, step, model, tokenizer, state)
        if self.processes > 1:
            dist.barrier()


def is_finite(x):
    return not isinstance(x, float) or abs(x) < float("inf")


def portable(name):
    """A path as config.json keeps it: inside this repository relative to it, so both may move."""
    if name is None or not Path(name).exists():
        return name
    path = Path(name).resolve()
    return str(path.relative_to(ROOT) if ROOT in path.parents else os.path.normpath(name))


def replace_file(path, text):
    """Write a file aside and rename it: a kill leaves the old one or the new one."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_checkpoint(run, step, model, tokenizer, state):
    """Write run/checkpoint-<step>: a Hugging Face folder plus the optimizer's state.

    With adapters the folder holds the merged model, and its folder adapters/ the adapters: in bf16
    the merged weights are an approximation. It is written aside and renamed, so a crash never
    damages an earlier one. The last two are kept. Raises BadInput, for example for a full disk.
    """
    folder = Path(run, f"checkpoint-{step}")
    aside = Path(run, "checkpoint.tmp")
    remove(aside)
    try:
        with as_it_came(model, tokenizer):
            save_model(model, aside)
            tokenizer.save_pretrained(aside)
        torch.save(state, aside / "optimizer.pt")
        files = [file for file in aside.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(aside)): file.stat().st_size for file in files}
        (aside / "whole.json").write_text(json.dumps({"step": step, "sizes": sizes}))
        remove(folder)  # an incomplete one of the same step
        aside.rename(folder)
    except Exception as error:  # OSError, and what safetensors and torch.save make of a full disk
        remove(aside)
        rest = "earlier checkpoints are complete: free disk space, then --resume"
        raise BadInput(f"cannot save {folder}: {first_line(error)}; {rest}") from error
    for old in [old for old in checkpoints(run) if step_of(old) <= step][:-2]:
        remove(old)


def remove(folder):
    """Delete a folder, or the link to one; a warning where that is not possible."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"cannot remove {folder}: {error}")


def step_of(path):
    """The step of a checkpoint's folder; None for other names, such as checkpoint-best."""
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else None


def checkpoints(run):
    """The checkpoint folders of a run, oldest first."""
    folders = [path for path in Path(run).glob("checkpoint-*") if step_of(path) is not None]
    return sorted(folders, key=step_of)


def load_state(folder):
    """The optimizer's state, mapped from the file: read where it is needed, shared by processes."""
    try:
        path = folder / "optimizer.pt"
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise BadInput(f"not enough memory to read {path}: {first_line(error)}") from error
        raise


def find_checkpoint(run, with_state):
    """(folder, step) of the newest complete checkpoint, else (None, 0); prints what it skips."""
    for folder in reversed(checkpoints(run)):
        try:
            whole = json.loads((folder / "whole.json").read_text())
            assert all((folder / name).stat().st_size == n for name, n in whole["sizes"].items())
            for file in folder.glob("*.safetensors"):
                with safe_open(file, "pt"):  # reads the header: a file of the right size may be empty
                    pass
            if with_state:
                load_state(folder)
            say(f"continuing from {folder}")
            return folder, whole["step"]
        except BadInput:
            raise
        except Exception:  # a missing file, half a JSON text, zeros, code where weights should be
            say(f"{folder} is incomplete: skipped")
    say(f"{run} has no complete checkpoint: starting from step 0")
    return None, 0


def parse_args(Args, TINY, argv=None):
    """Args from the command line. Without --model, TINY replaces the defaults; given flags win."""
    fields = [
        (field.name, field.type, arg(field.default, field.metadata["help"]))
        for field in dataclasses.fields(Args)
    ]
    for _, _, field in fields:
        field.metadata = {"help": field.metadata["help"]}  # HfArgumentParser knows no bounds
    parser = HfArgumentParser(
        dataclasses.make_dataclass("Args", fields), allow_abbrev=False,
        usage="%(prog)s [--flag value ...]   (--help lists the flags)",
        description="Without --model, the defaults are those of TINY in this script.")  # fmt: skip
    given = parser.parse_known_args(argv)[0]
    if given.model is None:
        parser.set_defaults(**TINY)
    if given.lora_rank > 0:
        parser.set_defaults(learning_rate=10 * parser.get_default("learning_rate"))
    return Args(**vars(parser.parse_args(argv)))


def run_script(main, Args, TINY):
    """What a script does when started: parse the flags, run main, and end with one sentence."""
    args = parse_args(Args, TINY)
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace")  # a console that cannot show a character shows ?
    try:
        start_process(args.device)
        return main(args)
    except KeyboardInterrupt:
        code = 130
        message = "interrupted: add --resume to continue from the last checkpoint"
    except torch.OutOfMemoryError:
        code = 2
        message = "error: out of GPU memory: lower --micro_batch_tokens, or use --lora_rank"
    except (BadInput, OSError) as error:  # OSError: for example a full disk
        code = 2
        message = f"error: {error}"
    finally:
        number = world()[0]
        if dist.is_initialized():
            dist.destroy_process_group()
    if number > 0:
        time.sleep(5)  # torchrun ends this process first if rank 0 says the same
    print(message, file=sys.stderr)
    sys.exit(code)
