"""Rollout and evaluation: what is drawn, where it stops, what is scored, what moves the random state (FAULTS 18-23)."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

import grpo
from common import BadInput, check_model, encode_prompt, load_model, recompute_activations, stop_token_ids
from common import token_logps_and_entropies

QUESTIONS = ["3+8+4=", "1+2=", "9+9+9+9=", "5+0+7="]
EOS, PAD = 257, 258


@pytest.fixture(scope="module")
def tiny():
    return load_model(grpo.TINY_DIR, "cpu")


def arguments(**given):
    return replace(grpo.parse_args([]), **{"max_new_tokens": 24, **given})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def encoded(tokenizer, texts=QUESTIONS):
    return [encode_prompt(tokenizer, text) for text in texts]


class Scripted(torch.nn.Module):
    """A model that always answers token t with followers[t]."""

    def __init__(self, followers, vocabulary=400):
        super().__init__()
        self.followers, self.vocabulary, self.device = followers, vocabulary, torch.device("cpu")
        self.config = transformers.Qwen2Config(num_hidden_layers=1)
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def forward(self, ids, **kwargs):
        logits = torch.full((len(ids), 1, self.vocabulary), -1e9)
        for row, last in enumerate(ids[:, -1].tolist()):
            logits[row, 0, self.followers[last]] = 0.0
        return SimpleNamespace(logits=logits)


# --- what is drawn ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_18_sampling_is_exactly_softmax_of_logits_over_temperature(tiny, temperature):
    """Fault: the model's own generation_config (temperature, top-k, top-p, penalty) leaks into sampling."""
    model, tokenizer = tiny
    trap = model.generation_config
    assert (trap.temperature, trap.top_k, trap.top_p, trap.repetition_penalty) == (0.1, 5, 0.5, 1.3)
    prompt = tokenizer("3+8+4=\\boxed{").input_ids  # about ten digits may follow, none of them certain
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1) * 20_000
    args = arguments(max_new_tokens=1, temperature=temperature)
    ids, *_ = grpo.rollout(model, tokenizer, [prompt], 20_000, args, generator())
    counts = torch.bincount(ids[:, -1], minlength=len(expected)).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    free = len(expected) - 1
    assert free >= 6  # more than the trap's top-k leaves
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert chi_square < free + 4 * (2 * free) ** 0.5


def check_draws(model, ids, attention_mask, mask, uniforms, temperature=1.0):
    """Every token is the one whose share of the unit interval holds its uniform number, by a forward of its row alone:
    without cache, padding or other rows."""
    for i in range(len(ids)):
        length, prompt = int(mask[i].sum()), ids.shape[1] - mask.shape[1]
        row = ids[i, : prompt + length][attention_mask[i, : prompt + length].bool()]
        with torch.no_grad():
            logits = model(row[None], use_cache=False).logits[0, -length - 1 : -1]
        cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
        upper = cdf.gather(1, row[-length:, None])[:, 0]
        lower = torch.where(row[-length:] > 0, cdf.gather(1, (row[-length:, None] - 1).clamp(min=0))[:, 0], 0.0)
        drawn = uniforms[i, :length]
        assert (lower - 1e-4 <= drawn).all() and (drawn <= upper + 1e-4).all()


FAMILY = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.4, "pad_token_id": PAD, "bos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", FAMILY),
    "gpt2": ("GPT2Config", {"vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}),
    "gemma2 sliding": ("Gemma2Config", {**FAMILY, "head_dim": 8, "sliding_window": 6, "initializer_range": 0.1}),
    "mistral sliding": ("MistralConfig", {**FAMILY, "sliding_window": 6}),
    "qwen3": ("Qwen3Config", {**FAMILY, "head_dim": 8}),
    # With layers that keep a state beside keys and values, or instead of them:
    "falcon-h1": ("FalconH1Config", {
        **FAMILY, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
    "qwen3.5": ("Qwen3_5TextConfig", {
        **FAMILY, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "lfm2": ("Lfm2Config", {
        **FAMILY, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "conv_L_cache": 3}),
    "mixtral noisy": ("MixtralConfig", {
        **FAMILY, "num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_3_every_family_draws_what_a_forward_of_the_row_alone_would(tiny, family):
    """Fault: left padding, the cache or rows that leave the batch shift a row's positions or its attention."""
    torch.manual_seed(0)
    name, fields = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields)).eval()
    recompute_activations(model)  # as in a run with gradient checkpointing
    check_model(model, [], arguments())
    model.generation_config.eos_token_id = list(range(0, 250, 12))  # so that rows end at very different times
    args = arguments(max_new_tokens=16, temperature=0.8)
    prompts = [[50, 51, 52], list(range(60, 75)), [80, PAD, 81, 82, 83]]
    ids, attention_mask, mask, finished, _ = grpo.rollout(model, tiny[1], prompts, 5, args, generator())
    lengths = mask.sum(1)
    assert lengths.unique().numel() > 2 and 0 < finished.sum() < len(finished)
    uniforms = torch.rand(15, 16, generator=generator())
    check_draws(model, ids, attention_mask, mask, uniforms, 0.8)


def test_3_a_model_that_forgets_what_it_has_read_is_refused():
    """Fault: a model with a cache of another kind samples from a wrong distribution, and nothing shows it."""
    torch.manual_seed(0)
    for name, fields in ("RwkvConfig", {"attention_hidden_size": 32}), ("MambaConfig", {"state_size": 8}):
        fields = {**FAMILY, **fields}
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields)).eval()
        with pytest.raises(BadInput, match="cannot be sampled from here"):
            check_model(model, [], arguments())


def test_3_tiny_model_draws_what_a_forward_of_the_row_alone_would(tiny):
    """Fault: as above, on the trained model, whose distributions are sharp."""
    model, tokenizer = tiny
    ids, attention_mask, mask, *_ = grpo.rollout(model, tokenizer, encoded(tokenizer), 4, arguments(), generator())
    check_draws(model, ids, attention_mask, mask, torch.rand(16, 24, generator=generator()))


def test_4_decode_loop_and_scoring_give_the_same_log_probs(tiny):
    """Fault: the log-probs of training are not those of sampling (padding, temperature, cache)."""
    model, tokenizer = tiny
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(  # a copy, or rollout could change it
        lambda module, args, output: seen.append(output[:, -1].clone())
    )
    with hook:
        ids, attention_mask, mask, *_ = grpo.rollout(
            model, tokenizer, encoded(tokenizer), 4, arguments(temperature=0.7), generator()
        )
    T = mask.shape[1]
    assert len(seen) == T and len(seen[0]) == len(QUESTIONS)  # each prompt is read once for all its samples
    seen[0] = seen[0].repeat_interleave(4, 0)
    decoded = torch.zeros(mask.shape)
    for t, logits in enumerate(seen):
        live = mask[:, t]
        assert len(logits) == live.sum()  # ended rows cost nothing
        decoded[live, t] = (logits / 0.7).log_softmax(-1).gather(1, ids[live, -T + t, None])[:, 0]
    with torch.no_grad():
        scored, _ = token_logps_and_entropies(model, ids, attention_mask, T, 0.7)
    torch.testing.assert_close(scored[mask], decoded[mask], atol=1e-4, rtol=0)


def test_23_a_row_does_not_depend_on_when_the_others_end(tiny):
    """Fault: one row's end shifts the random numbers of the rows after it."""
    model, tokenizer = tiny
    a, b = encoded(tokenizer, ["1+2=", "9+9+9+9="])
    ids, _, mask, *_ = grpo.rollout(model, tokenizer, [a, b], 6, arguments(), generator())
    together = [row[keep].tolist() for row, keep in zip(ids[:, -mask.shape[1] :], mask)]
    alone, stream = [], generator()
    for prompt in a, b:  # one stream: the draws of a, then those of b
        ids, _, mask, *_ = grpo.rollout(model, tokenizer, [prompt], 6, arguments(), stream)
        alone += [row[keep].tolist() for row, keep in zip(ids[:, -mask.shape[1] :], mask)]
    assert together == alone and len({len(row) for row in together}) > 2


# --- where it stops ---


@pytest.mark.parametrize(
    "configured, expected", [(77, [77, EOS]), ([77, 88], [77, 88, EOS]), (None, [EOS]), ([], [EOS])]
)
def test_19_stop_ids_of_generation_config_as_int_list_or_none(tiny, configured, expected):
    """Fault: only one stop id is known, or a list or None crashes."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_token_ids(model, tiny[1]) == expected


@pytest.mark.parametrize("listed", [True, False])
def test_19_end_of_turn_of_the_chat_template_stops(tiny, listed):
    """Fault: a chat model writes its end of turn, which is not its eos, and runs on."""
    tokenizer = copy.deepcopy(tiny[1])
    if listed:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    else:  # as in Llama 3 and Phi 3: marked special in the vocabulary, but under no name
        tokenizer.add_tokens([transformers.AddedToken("<|turn|>", special=True)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|turn|>\n{% endfor %}"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    assert stop_token_ids(model, tokenizer) == [EOS, tokenizer.convert_tokens_to_ids("<|turn|>")]


def test_19_a_template_without_end_of_turn_adds_no_stop_id(tiny):
    """Fault: an ordinary token that the template writes after an answer, such as a line break, ends responses."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert stop_token_ids(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)), tokenizer) == [EOS]


def test_19_rows_stop_at_the_first_of_several_stop_ids(tiny):
    """Fault: a row runs past a stop id, or the stop token itself is not trained on."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    model.generation_config.eos_token_id = [ord(";"), ord("+")]
    ids, attention_mask, mask, finished, _ = grpo.rollout(
        model, tokenizer, encoded(tokenizer), 8, arguments(max_new_tokens=4), generator()
    )
    completions = ids[:, -mask.shape[1] :]
    stops = set()
    for row, keep, ended in zip(completions, mask, finished):
        drawn = row[keep].tolist()
        at = [t for t, token in enumerate(drawn) if token in (EOS, ord(";"), ord("+"))]
        assert at == ([len(drawn) - 1] if ended else []) and (ended or len(drawn) == 4)
        stops |= {drawn[t] for t in at}
    assert len(stops) > 1 and 0 < finished.sum() < len(finished)
    assert torch.equal(attention_mask[:, -mask.shape[1] :].bool(), mask)


def test_2_pad_that_is_eos_is_masked_by_position(tiny):
    """Fault: with pad == eos the stop token is masked with the pads, and the model never learns to stop."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.pad_token = tokenizer.eos_token
    model = Scripted({2: 5, 5: 6, 6: EOS, 3: 7, 7: 8, 8: 9, 9: 10, 10: EOS})
    ids, attention_mask, mask, finished, _ = grpo.rollout(
        model, tokenizer, [[1, 2], [3]], 1, arguments(max_new_tokens=9), generator()
    )
    assert ids.tolist() == [[1, 2, 5, 6, EOS, EOS, EOS], [EOS, 3, 7, 8, 9, 10, EOS]]
    assert mask.tolist() == [[True, True, True, False, False], [True] * 5]
    assert attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]
    assert finished.tolist() == [True, True]


def test_2_pad_inside_the_prompt_stays_attended(tiny):
    """Fault: every pad id is masked, also one that the prompt holds."""
    model = Scripted({2: 5, 5: EOS, 3: EOS})
    ids, attention_mask, mask, *_ = grpo.rollout(
        model, tiny[1], [[1, PAD, 2], [PAD, 3]], 1, arguments(max_new_tokens=4), generator()
    )
    assert ids.tolist() == [[1, PAD, 2, 5, EOS], [PAD, PAD, 3, EOS, PAD]]
    assert attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]


def test_9_truncated_rows_are_whole_and_not_finished(tiny):
    """Fault: a response that was cut off counts as ended, or one whose last token is the stop counts as cut off."""
    model = Scripted({1: 5, 5: 6, 6: EOS, 2: 7, 7: 8, 8: 9, 9: 9})
    *_, mask, finished, texts = grpo.rollout(model, tiny[1], [[1], [2]], 1, arguments(max_new_tokens=3), generator())
    assert mask.tolist() == [[True] * 3] * 2
    assert finished.tolist() == [True, False]
    assert texts == ["\x05\x06", "\x07\x08\x09"]


def test_22_ids_above_the_tokenizers_length_are_kept(tiny):
    """Fault: a padded vocabulary has ids that the tokenizer does not know, and decoding them crashes."""
    assert len(tiny[1]) < 300
    model = Scripted({1: 300, 300: 399, 399: ord("7"), ord("7"): EOS})
    ids, _, mask, _, texts = grpo.rollout(model, tiny[1], [[1]], 2, arguments(max_new_tokens=9), generator())
    assert ids.tolist() == [[1, 300, 399, ord("7"), EOS]] * 2 and mask.all()
    assert texts == ["7", "7"]


def test_19_without_any_stop_id_every_row_runs_to_the_end(tiny):
    """Fault: a tokenizer without eos crashes the search for stop ids."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.eos_token = None
    args = arguments(max_new_tokens=3)
    *_, mask, finished, _ = grpo.rollout(Scripted({1: 1}), tokenizer, [[1]], 2, args, generator())
    assert mask.all() and mask.shape == (2, 3) and not finished.any()


# --- what is scored ---


def test_20_the_sampled_ids_are_scored_never_text_encoded_again(tiny, monkeypatch, tmp_path):
    r"""Fault: the text is tokenized again for the update, and a box spelled out becomes the one token \boxed{."""
    spelled = [ord(c) for c in "\\boxed{"] + [EOS]  # decodes to the same text as the one token 256
    assert tiny[1](tiny[1].decode(spelled[:-1])).input_ids == [256]
    drawn, scored = [], []

    def rollout(*given, real=grpo.rollout):
        ids, attention_mask, mask, finished, texts = real(*given)
        T = mask.shape[1]
        ids[0, -T : len(spelled) - T], mask[0] = torch.tensor(spelled), torch.arange(T) < len(spelled)
        attention_mask[0, -T:] = mask[0]
        if len(ids) == 16:  # not an evaluation
            drawn.extend(row[keep].tolist() for row, keep in zip(ids, attention_mask.bool()))
        return ids, attention_mask, mask, finished, texts

    def helper(model, ids, attention_mask, *rest, real=token_logps_and_entropies):
        scored.extend(row[keep].tolist() for row, keep in zip(ids, attention_mask.bool()))
        return real(model, ids, attention_mask, *rest)

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "token_logps_and_entropies", helper)
    flags = "--steps 1 --prompts_per_step 4 --group_size 4 --micro_batch_tokens 200 --eval_problems 2"
    grpo.main(grpo.parse_args([*flags.split(), "--output_dir", str(tmp_path)]))
    assert len(drawn) == 16 and drawn[0][-len(spelled) :] == spelled
    assert sorted(scored) == sorted(drawn)


# --- the random state ---


def test_23_same_seed_and_step_same_samples_another_seed_or_step_others(tiny):
    """Fault: a run cannot be repeated, or two steps, seeds or purposes share their draws."""
    model, tokenizer = tiny

    def drawn(seed, purpose, number):
        stream = grpo.random_stream(seed, purpose, number)
        return grpo.rollout(model, tokenizer, encoded(tokenizer), 4, arguments(), stream)[-1]

    first = drawn(0, "draws", 1)
    torch.rand(5)  # nobody else's draws matter
    assert drawn(0, "draws", 1) == first
    assert all(drawn(*other) != first for other in [(1, "draws", 1), (0, "draws", 2), (0, "evaluation", 1)])
    keys = [(seed, purpose, n) for seed in range(20) for purpose in ("draws", "order", "evaluation") for n in range(50)]
    # Their first numbers, not their initial seeds: of a seed torch's CPU generator takes the low 32 bits only.
    assert len({tuple(torch.rand(4, generator=grpo.random_stream(*key)).tolist()) for key in keys}) == len(keys)


def test_23_large_seeds_are_seeds_too():
    """Fault: a 32-bit seed overflows the generator's."""
    drawn = {torch.rand(1, generator=grpo.random_stream(seed, "draws", 1)).item() for seed in (0, 2**31, 2**32, 2**40)}
    assert len(drawn) == 4


@pytest.mark.parametrize("training", [True, False])
def test_23_an_evaluation_moves_neither_the_random_state_nor_the_model(tiny, tmp_path, training):
    """Fault: an evaluation draws from the training's randomness, or leaves the model in another mode."""
    model, tokenizer = copy.deepcopy(tiny[0]).train(training), tiny[1]
    problems = [{"question": q, "answer": "3", "prompt_ids": ids} for q, ids in zip(QUESTIONS, encoded(tokenizer))]
    before, weights = torch.get_rng_state(), [weight.clone() for weight in model.parameters()]
    results = [grpo.evaluate(model, tokenizer, problems, arguments(), tmp_path / "eval.jsonl") for _ in range(2)]
    assert results[0] == results[1]  # the same draws each time
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training == training and all(map(torch.equal, weights, model.parameters()))


def test_23_training_is_the_same_with_and_without_evaluations(tmp_path):
    """Fault: evaluating more often changes the run."""
    flags = "--steps 2 --prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_problems 4"
    train = f"{grpo.TINY_DIR}/train.jsonl"  # a file alone has no held-out problems
    grpo.main(grpo.parse_args([*flags.split(), "--output_dir", str(tmp_path / "often"), "--eval_every", "1"]))
    grpo.main(grpo.parse_args([*flags.split(), "--output_dir", str(tmp_path / "never"), "--dataset", train]))
    assert len(list((tmp_path / "often").glob("eval-*"))) == 3 and not list((tmp_path / "never").glob("eval-*"))
    often, never = ((tmp_path / name / "checkpoint-2/model.safetensors").read_bytes() for name in ("often", "never"))
    assert often == never
