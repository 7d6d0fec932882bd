"""Small random models of the families that were tried, for the tests of log-probs and rollout."""

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

V = 97  # a prime, so that no other size is a multiple of it
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GQA, "head_dim": 8}
EXPERTS = {**GQA, "num_local_experts": 2, "num_experts_per_tok": 1}
LINEAR = {
    **HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

FAMILIES = {  # name: (config class, its fields)
    "qwen2, tied": ("Qwen2Config", {**GQA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", HEADS),
    "llama": ("LlamaConfig", {**GQA, "tie_word_embeddings": False}),
    "mistral, sliding": ("MistralConfig", {**GQA, "sliding_window": 6}),
    "mixtral, jitter": ("MixtralConfig", {**EXPERTS, "router_jitter_noise": 0.1}),
    "gemma2, capped": ("Gemma2Config", {
        **HEADS, "final_logit_softcapping": 3.0, "sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 8}),
    "granite, scaled": ("GraniteConfig", {**GQA, "logits_scaling": 3.0}),
    "cohere, scaled": ("CohereConfig", {**GQA, "logit_scale": 0.3}),
    "minicpm3, scaled before the head": ("MiniCPM3Config", {
        **SIZES, "num_key_value_heads": 4, "dim_model_base": 8, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}),
    "gpt2, dropout": ("GPT2Config", {
        "vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.1}),
    "gpt-neox": ("GPTNeoXConfig", SIZES),
    "phi, bias": ("PhiConfig", GQA),
    "opt, own positions": ("OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "falcon": ("FalconConfig", {**SIZES, "alibi": False}),
    "bloom, alibi": ("BloomConfig", {
        "vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    # Hybrids: layers that keep a state beside keys and values, or instead of them.
    "falcon-h1, scaled": ("FalconH1Config", {
        **GQA, "lm_head_multiplier": 0.3, "mamba_d_ssm": 32, "mamba_n_heads": 4,
        "mamba_d_head": 8, "mamba_d_state": 8}),
    "mamba2": ("Mamba2Config", {
        **SIZES, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    "granite hybrid": ("GraniteMoeHybridConfig", {
        **GQA, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 8}),
    "lfm2": ("Lfm2Config", {
        **GQA, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "conv_L_cache": 3}),
    "qwen3-next": ("Qwen3NextConfig", {
        **LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
}  # fmt: skip

class TransformedHidden(transformers.LlamaForCausalLM):
    """Something stands between its decoder and its head."""

    def __init__(self, config):
        super().__init__(config)
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, *args, **kwargs):
        hidden = self.model(*args, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(self.dense(hidden)))


class MaskedVocabulary(transformers.LlamaForCausalLM):
    """Its last seven ids can never be drawn."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits[..., V - 7 :] = -torch.inf
        return out


class CutVocabulary(transformers.LlamaForCausalLM):
    """Its logits are fewer than its head has rows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[..., : V - 7]
        return out


def make_model(family="llama", **fields):
    """A random model in evaluation mode; fields change its config."""
    torch.manual_seed(0)
    name, defaults = FAMILIES[family]
    config = getattr(transformers, name)(**{**defaults, **fields})
    config._experts_implementation = "eager"  # the grouped product knows no float64
    return perturb(transformers.AutoModelForCausalLM.from_config(config))


def perturb(model):
    """Random weights are small: biases would stay 0, and neither cap nor position would show."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()
