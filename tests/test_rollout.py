"""Rollout and evaluation: what is drawn, where it stops, what is scored, what moves the random
state; and models whose cache or padding does not do what rollout needs.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import TINY, parse, run, training_lines
from families import FAMILIES, GQA, SIZES, make_model, perturb

import common
import grpo
from common import BadInput, check_model, check_sampling, encode_prompts, stop_token_ids

QUESTIONS = ["3+8+4=", "1+2=", "9+9+9+9=", "5+0+7="]
EOS, PAD = 257, 258


def arguments(**given):
    return replace(parse(), **{"max_new_tokens": 24, **given})


def streams(count, seed=0, first=0):
    return [grpo.random_stream(seed, "draws", first + i) for i in range(count)]


def problems_of(prompts):
    return [{"question": "?", "answer": "3", "prompt_ids": ids} for ids in prompts]


def encoded(tokenizer, questions=QUESTIONS):
    return problems_of(encode_prompts(tokenizer, questions, parse()))


def scripted(followers, vocabulary=400):
    """A model that always answers token t with followers[t]."""
    head = torch.nn.Linear(vocabulary, vocabulary, bias=False)
    head.weight.data = 1e9 * torch.eye(vocabulary)

    def decoder(input_ids, **given):
        answers = [[followers[token] for token in row[-1:]] for row in input_ids.tolist()]
        hidden = torch.nn.functional.one_hot(torch.tensor(answers), vocabulary).float()
        return SimpleNamespace(last_hidden_state=hidden)

    return SimpleNamespace(
        device=torch.device("cpu"), config=transformers.Qwen2Config(num_hidden_layers=1),
        generation_config=SimpleNamespace(eos_token_id=None), eval=lambda: None,
        get_decoder=lambda: decoder, get_output_embeddings=lambda: head)  # fmt: skip


def write(followers, tokenizer, prompts, samples=1, **given):
    """The Batch of a scripted model."""
    problems = problems_of(prompts)
    args = arguments(**given)
    model = scripted(followers)
    return grpo.rollout(model, tokenizer, problems, samples, args, streams(len(prompts)))


# --- what is drawn ---
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_is_exactly_softmax_of_logits_over_temperature(tiny, temperature):
    """Fault: the model's own generation_config (temperature, top-k) leaks into sampling."""
    model, tokenizer = tiny
    trap = model.generation_config
    settings = trap.temperature, trap.top_k, trap.top_p, trap.repetition_penalty
    assert settings == (0.1, 5, 0.5, 1.3)
    prompt = tokenizer("3+8+4=\\boxed{").input_ids  # about ten digits may follow, none certain
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1) * 20_000
    args = arguments(max_new_tokens=1, temperature=temperature)
    batch = grpo.rollout(model, tokenizer, problems_of([prompt]), 20_000, args, streams(1))
    counts = torch.bincount(batch.input_ids[:, -1], minlength=len(expected)).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    free = len(expected) - 1
    assert free >= 6  # more than the trap's top-k leaves
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert chi_square < free + 4 * (2 * free) ** 0.5


def test_a_token_of_probability_0_is_never_drawn():
    """Fault: a uniform number of 0, or one that rounds up to 1, takes the first or the last id."""
    logits = torch.full((3, 7), -torch.inf)
    logits[:, 2:5] = torch.tensor([0.0, 1.0, 0.5])
    tokens, logps = grpo.sample(logits.clone(), torch.tensor([0.0, 0.5, 1 - 2**-24]), 1.0)
    assert tokens.tolist() == [2, 3, 4]
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logps, expected, atol=1e-6, rtol=0)


def test_temperature_0_takes_the_most_likely_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 5.1]])
    assert grpo.sample(logits, torch.tensor([0.99, 0.01]), 0)[0].tolist() == [1, 2]


def check_draws(model, batch, uniforms, temperature=1.0):
    """Each token is the one whose share of the unit interval holds its uniform number.

    By a forward pass of its row alone: without cache, padding or other rows.
    """
    prompt = batch.input_ids.shape[1] - batch.mask.shape[1]
    for i in range(len(batch.mask)):
        length = int(batch.mask[i].sum())
        real = batch.attention_mask[i, : prompt + length].bool()
        row = batch.input_ids[i, : prompt + length][real]
        tokens = row[-length:, None]
        with torch.no_grad():
            logits = model(row[None], use_cache=False).logits[0, -length - 1 : -1]
        cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
        upper = cdf.gather(1, tokens)
        lower = cdf.gather(1, (tokens - 1).clamp(min=0)).where(tokens > 0, 0.0)
        drawn = uniforms[i, :length, None]
        assert (lower - 1e-4 <= drawn).all() and (drawn <= upper + 1e-4).all()


def difference(model, batch, args):
    """|sampled - scored| log-probs over the response tokens, in micro-batches of a few rows."""
    args = replace(args, micro_batch_tokens=150)
    batch.old_logps, batch.entropies = grpo.score(model, batch, args)
    assert batch.old_logps[batch.mask].abs().max() > 0.1
    check_sampling(batch)
    return (batch.sampled_logps - batch.old_logps).abs()[batch.mask]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_what_a_forward_of_the_row_alone_would(tokenizer, tmp_path, family):
    """Fault: padding, the cache or rows that leave the batch shift a row's positions or state."""
    sizes = {"vocab_size": 259, "pad_token_id": PAD, "eos_token_id": EOS}
    make_model(family, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = common.load_model(tmp_path, "cpu")  # without dropout and jitter
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()  # as in a run
    args = arguments(max_new_tokens=16, temperature=0.8)
    problems = problems_of([[50, 51, 52], list(range(60, 75)), [80, PAD, 81, 82, 83]])
    check_model(model, problems, args)
    model.generation_config.eos_token_id = list(range(0, 250, 18))  # rows end at different times
    batch = grpo.rollout(model, tokenizer, problems, 5, args, streams(3))
    assert batch.mask.sum(1).unique().numel() > 2
    assert 0 < batch.finished.sum() < len(batch.finished)
    uniforms = torch.cat([torch.rand(5, 16, generator=stream) for stream in streams(3)])
    check_draws(model, batch, uniforms, 0.8)
    differences = difference(model, batch, args)
    assert differences.mean() < 1e-5 and differences.max() < 1e-4


def test_the_tiny_model_draws_what_a_forward_of_the_row_alone_would(tiny):
    """Fault: as above, on a trained model, whose distributions are sharp."""
    model, tokenizer = tiny
    batch = grpo.rollout(model, tokenizer, encoded(tokenizer), 4, arguments(), streams(4))
    uniforms = torch.cat([torch.rand(4, 24, generator=stream) for stream in streams(4)])
    check_draws(model, batch, uniforms)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_and_scored_log_probs_are_equal(tiny, temperature):
    """Fault: the log-probs of training are not those of sampling (padding, temperature, cache)."""
    model, tokenizer = tiny
    args = arguments(temperature=temperature)
    batch = grpo.rollout(model, tokenizer, encoded(tokenizer), 4, args, streams(4))
    differences = difference(model, batch, args)
    assert differences.mean() < 1e-6 and differences.max() < 1e-5


def test_a_prompt_is_read_once_and_ended_rows_cost_nothing(tiny, monkeypatch):
    """Fault: every sample reads its prompt again, or rows run on after their stop token."""
    model, tokenizer = tiny
    shapes = []

    def next_token_logits(model, ids, *rest):
        shapes.append(tuple(ids.shape))
        return common.next_token_logits(model, ids, *rest)

    monkeypatch.setattr(grpo, "next_token_logits", next_token_logits)
    batch = grpo.rollout(model, tokenizer, encoded(tokenizer), 4, arguments(), streams(4))
    T = batch.mask.shape[1]
    assert shapes[0] == (4, 8)
    assert shapes[1:] == [(int(batch.mask[:, t].sum()), 1) for t in range(1, T)]


# --- models that do not work with rollout ---
class Forgets(torch.nn.Module):
    """A decoder that keeps only so many tokens after the prompt; 0: it reads each one alone."""

    def __init__(self, decoder, after):
        super().__init__()
        self.decoder = decoder
        self.after = after
        self.seen = 0

    def forward(self, **given):
        if given["input_ids"].shape[1] > 1:
            self.seen = 0
        elif given["cache"] is not None:
            self.seen += 1
            if self.seen > self.after:
                mask = given["attention_mask"][:, -1:]
                given |= {"cache": None, "use_cache": False, "attention_mask": mask}
        return self.decoder(**given)


class ReadsPadding(torch.nn.Module):
    """A decoder that takes padding for text."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, **given):
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
        return self.decoder(**given)


def with_decoder(tiny, wrap, *given):
    model = copy.deepcopy(tiny[0])
    decoder = wrap(model.get_decoder(), *given)
    model.get_decoder = lambda: decoder
    return model


def start(monkeypatch, tiny, model, data, folder, *flags):
    """A run with this model, whatever --model says."""
    monkeypatch.setattr(grpo, "load_policy", lambda name, args: (model, tiny[1]))
    run(data, folder, "--steps", 2, *flags)


def make_other(name, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **fields, "vocab_size": 259})
    return perturb(transformers.AutoModelForCausalLM.from_config(config))


UNUSABLE = {
    "forgets": lambda tiny: with_decoder(tiny, Forgets, 0),
    "reads padding": lambda tiny: with_decoder(tiny, ReadsPadding),
    "rwkv": lambda tiny: make_other("RwkvConfig", attention_hidden_size=32),
    "mamba": lambda tiny: make_other("MambaConfig", state_size=8),
    "falcon-mamba": lambda tiny: make_other("FalconMambaConfig", state_size=8),
    "minimax": lambda tiny: make_other("MiniMaxConfig", **{
        **GQA, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}),
}  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--steps", 0]], ids=["training", "only evaluating"])
@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_model_that_rollout_cannot_use_ends_in_a_sentence(
        tiny, data, tmp_path, monkeypatch, fault, flags):  # fmt: skip
    """Fault: responses come from another distribution than the model's, and nothing shows it."""
    model = UNUSABLE[fault](tiny)
    with pytest.raises(BadInput, match="cannot be used here|cache or padding") as error:
        start(monkeypatch, tiny, model, data, tmp_path, *flags)
    assert type(model).__name__ in str(error.value) and "\n" not in str(error.value)


def test_a_cache_that_forgets_later_ends_the_first_step(tiny, data, tmp_path, monkeypatch):
    """Fault: as above, for one that a glance at the start does not find."""
    model = with_decoder(tiny, Forgets, 6)
    with pytest.raises(BadInput, match="^sampling and training disagree on log-probs by "):
        start(monkeypatch, tiny, model, data, tmp_path)
    (line,) = training_lines(tmp_path)
    assert line["step"] == 1 and line["sampling_logp_diff"] > 0.1


def test_a_healthy_run_logs_the_difference(data, tmp_path):
    run(data, tmp_path, "--steps", 2)
    for line in training_lines(tmp_path):
        assert 0 < line["sampling_logp_diff"] < 1e-6


def test_bf16_is_not_taken_for_a_fault(data, tmp_path, monkeypatch):
    """Fault: the difference that bf16 makes (0.02 to 0.04 in a real model) ends the run."""
    monkeypatch.setitem(common.DTYPES, "cpu", torch.bfloat16)
    run(data, tmp_path, "--steps", 1, "--no_gradient_checkpointing")
    (line,) = training_lines(tmp_path)
    assert 1e-4 < line["sampling_logp_diff"] < 0.05


def test_logits_are_float32_in_rollout_and_update_and_come_from_one_function(tiny, monkeypatch):
    """Fault: in bf16 sampling and scoring round their logits, each in its own way."""
    model, tokenizer = copy.deepcopy(tiny[0]).bfloat16(), tiny[1]
    dtypes = []

    def project(*given, real=common.project):
        logits = real(*given)
        dtypes.append(logits.dtype)
        return logits

    monkeypatch.setattr(common, "project", project)
    args = arguments()
    batch = grpo.rollout(model, tokenizer, encoded(tokenizer), 4, args, streams(4))
    in_rollout = len(dtypes)
    assert in_rollout == batch.mask.shape[1]
    for _, _, logps, _ in grpo.micro_batches(model, batch, args):
        logps.sum().backward()
    assert len(dtypes) >= in_rollout + 2  # forward and backward
    assert set(dtypes) == {torch.float32}
    assert batch.sampled_logps.dtype == torch.float32


# --- where it stops ---
@pytest.mark.parametrize(
    "configured, expected",
    [(77, [77, EOS]), ([77, 88], [77, 88, EOS]), (None, [EOS]), ([], [EOS])],
)
def test_stop_ids_of_generation_config_as_int_list_or_none(tiny, configured, expected):
    """Fault: only one stop id is known, or a list or None crashes."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_token_ids(model, tiny[1], parse()) == expected


WITHOUT_IDS = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}END\n{% endfor %}"


@pytest.mark.parametrize("listed", [True, False])
def test_the_end_of_turn_of_the_chat_template_stops(tokenizer, listed):
    """Fault: a chat model writes its end of turn, which is not its eos, and runs on."""
    if listed:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    else:  # as in Llama 3 and Phi 3: marked special in the vocabulary, but under no name
        tokenizer.add_tokens([transformers.AddedToken("<|turn|>", special=True)])
    tokenizer.chat_template = TEMPLATE.replace("END", "<|turn|>")
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    assert stop_token_ids(WITHOUT_IDS, tokenizer, parse()) == [EOS, turn]


def test_a_template_without_end_of_turn_adds_no_stop_id(tokenizer):
    """Fault: an ordinary token that the template writes after an answer ends responses."""
    tokenizer.chat_template = TEMPLATE.replace("END", "")
    assert stop_token_ids(WITHOUT_IDS, tokenizer, parse()) == [EOS]


def test_rows_stop_at_the_first_of_several_stop_ids(tiny):
    """Fault: a row runs past a stop id, or the stop token itself is not trained on."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    model.generation_config.eos_token_id = [ord(";"), ord("+")]
    args = arguments(max_new_tokens=4)
    batch = grpo.rollout(model, tokenizer, encoded(tokenizer), 8, args, streams(4))
    T = batch.mask.shape[1]
    stops = set()
    for row, keep, ended in zip(batch.input_ids[:, -T:], batch.mask, batch.finished):
        drawn = row[keep].tolist()
        at = [t for t, token in enumerate(drawn) if token in (EOS, ord(";"), ord("+"))]
        assert at == ([len(drawn) - 1] if ended else [])
        assert ended or len(drawn) == 4
        stops |= {drawn[t] for t in at}
    assert len(stops) > 1 and 0 < batch.finished.sum() < len(batch.finished)
    assert torch.equal(batch.attention_mask[:, -T:].bool(), batch.mask)


def test_pad_that_is_eos_is_masked_by_position(tokenizer):
    """Fault: with pad == eos the stop token is masked too, and the model never learns to stop."""
    tokenizer.pad_token = tokenizer.eos_token
    followers = {2: 5, 5: 6, 6: EOS, 3: 7, 7: 8, 8: 9, 9: 10, 10: EOS}
    batch = write(followers, tokenizer, [[1, 2], [3]], max_new_tokens=9)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, EOS, EOS, EOS], [EOS, 3, 7, 8, 9, 10, EOS]]
    assert batch.mask.tolist() == [[True, True, True, False, False], [True] * 5]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]
    assert batch.finished.tolist() == [True, True]


def test_pad_inside_the_prompt_stays_attended(tokenizer):
    """Fault: every pad id is masked, also one that the prompt contains."""
    batch = write({2: 5, 5: EOS, 3: EOS}, tokenizer, [[1, PAD, 2], [PAD, 3]], max_new_tokens=4)
    assert batch.input_ids.tolist() == [[1, PAD, 2, 5, EOS], [PAD, PAD, 3, EOS, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]


def test_truncated_rows_are_complete_and_not_finished(tokenizer):
    """Fault: a response that was cut off counts as ended, or one that ends at C as cut off."""
    followers = {1: 5, 5: 6, 6: EOS, 2: 7, 7: 8, 8: 9, 9: 9}
    batch = write(followers, tokenizer, [[1], [2]], max_new_tokens=3)
    assert batch.mask.tolist() == [[True] * 3] * 2
    assert batch.finished.tolist() == [True, False]
    assert batch.texts == ["\x05\x06", "\x07\x08\x09"]


def test_ids_above_the_tokenizers_length_are_kept(tokenizer):
    """Fault: a padded vocabulary has ids that the tokenizer does not know: decoding crashes."""
    assert len(tokenizer) < 300
    followers = {1: 300, 300: 399, 399: ord("7"), ord("7"): EOS}
    batch = write(followers, tokenizer, [[1]], 2, max_new_tokens=9)
    assert batch.input_ids.tolist() == [[1, 300, 399, ord("7"), EOS]] * 2 and batch.mask.all()
    assert batch.texts == ["7", "7"]


def test_without_any_stop_id_every_row_runs_to_the_end(tokenizer):
    """Fault: a tokenizer without eos crashes the search for stop ids."""
    tokenizer.eos_token = None
    batch = write({1: 1}, tokenizer, [[1]], 2, max_new_tokens=3)
    assert batch.mask.all() and batch.mask.shape == (2, 3) and not batch.finished.any()


# --- what is scored ---
def test_the_sampled_ids_are_scored_never_text_encoded_again(tiny, monkeypatch, tmp_path):
    r"""Fault: the text is tokenized again, and a box spelled out becomes the one token \boxed{."""
    tokenizer = tiny[1]
    spelled = [ord(c) for c in "\\boxed{"] + [EOS]  # decodes to the text of the one token 256
    assert tokenizer(tokenizer.decode(spelled[:-1])).input_ids == [256]
    drawn = []
    scored = []

    def rollout(*given, real=grpo.rollout):
        batch = real(*given)
        T = batch.mask.shape[1]
        batch.input_ids[0, -T : len(spelled) - T] = torch.tensor(spelled)
        batch.mask[0] = torch.arange(T) < len(spelled)
        batch.attention_mask[0, -T:] = batch.mask[0]
        for row, keep in zip(batch.input_ids, batch.attention_mask.bool()):
            drawn.append(row[keep].tolist())
        return batch

    def helper(model, ids, attention_mask, *rest, real=common.token_logps_and_entropies):
        scored.extend(row[keep].tolist() for row, keep in zip(ids, attention_mask.bool()))
        return real(model, ids, attention_mask, *rest)

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "token_logps_and_entropies", helper)
    monkeypatch.setattr(common, "check_sampling", lambda batch: None)
    run(f"{TINY}/train.jsonl", tmp_path, "--steps", 1, "--micro_batch_tokens", 200)
    assert len(drawn) == 16 and drawn[0][-len(spelled) :] == spelled
    assert sorted(scored) == sorted(drawn)


# --- the random state ---
def test_a_place_draws_the_same_whatever_stands_beside_it(tiny):
    """Fault: a row's draws depend on the batch: on P, on the micro-batch, on when others end."""
    model, tokenizer = tiny
    questions = [*QUESTIONS, "7+7=", "0+0+0+1=", "8+1+6=", "2+2+2+2="]
    problems = encoded(tokenizer, questions)
    args = arguments()
    whole = grpo.rollout(model, tokenizer, problems, 6, args, streams(8))
    parts = []
    for first in 0, 4:
        some = problems[first : first + 4]
        parts.append(grpo.rollout(model, tokenizer, some, 6, args, streams(4, first=first)))
    assert whole.texts == parts[0].texts + parts[1].texts
    assert len({len(text) for text in whole.texts}) > 2
    logps = [batch.sampled_logps[batch.mask] for batch in (whole, *parts)]
    torch.testing.assert_close(logps[0], torch.cat(logps[1:]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_of_half_the_prompts_draws_the_same_responses(data, tmp_path, monkeypatch, seed):
    """Fault: as above, in a run: two steps of P = 2 meet what one step of P = 4 meets."""
    drawn = {}

    def grade(batch, problems, real=grpo.grade):
        for i, text in enumerate(batch.texts):
            drawn[P].append((problems[i // 4]["question"], text))
        return real(batch, problems)

    monkeypatch.setattr(grpo, "grade", grade)
    for P, steps in (4, 1), (2, 2):
        drawn[P] = []
        flags = ["--prompts_per_step", P, "--learning_rate", 0, "--seed", seed]
        run(f"{data}/train.jsonl", tmp_path / str(P), "--steps", steps, *flags)
    assert drawn[2] == drawn[4] and len(set(drawn[2])) > 8


def test_same_seed_and_place_same_samples_another_seed_or_place_others(tiny):
    """Fault: a run cannot be repeated, or two places, seeds or purposes share their draws."""
    model, tokenizer = tiny
    problems = encoded(tokenizer, QUESTIONS[:1])

    def drawn(seed, purpose, number):
        stream = grpo.random_stream(seed, purpose, number)
        return grpo.rollout(model, tokenizer, problems, 8, arguments(), [stream]).texts

    first = drawn(0, "draws", 1)
    torch.rand(5)  # nobody else's draws matter
    assert drawn(0, "draws", 1) == first
    for other in (1, "draws", 1), (0, "draws", 2), (0, "evaluation", 1):
        assert drawn(*other) != first
    # Compare first numbers: of a seed, torch's CPU generator takes only the low 32 bits.
    firsts = set()
    for seed in range(20):
        for purpose in "draws", "order", "evaluation":
            for n in range(50):
                stream = grpo.random_stream(seed, purpose, n)
                firsts.add(tuple(torch.rand(4, generator=stream).tolist()))
    assert len(firsts) == 20 * 3 * 50


def test_large_seeds_are_seeds_too():
    """Fault: a seed of more than 32 bits overflows the generator's."""
    seeds = 0, 2**31, 2**32, 2**40
    drawn = {torch.rand(1, generator=grpo.random_stream(seed, "draws", 1)).item() for seed in seeds}
    assert len(drawn) == 4


# --- evaluation ---
class Notes:
    """As much of a Run as evaluate needs."""

    def __init__(self, eval_rows=256):
        self.rewards = []
        self.eval_rows = eval_rows

    def share(self, items):
        return items

    def add_samples(self, problems, batch, rewards):
        self.rewards += rewards.tolist()

    def save_samples(self):
        return self.rewards


def test_an_evaluation_moves_neither_the_random_state_nor_the_weights(tiny):
    """Fault: an evaluation draws from the training's randomness, or changes the model."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    problems = encoded(tokenizer)
    before = torch.get_rng_state()
    weights = [weight.clone() for weight in model.parameters()]
    results = [grpo.evaluate(model, tokenizer, problems, arguments(), Notes()) for _ in range(2)]
    assert results[0] == results[1]  # the same draws each time
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize(
    "P, G, samples, problems, expected",
    [  # (prompts, samples) of each rollout
        (2, 2, 4, 11, [(4, 4), (4, 4), (3, 4)]),  # 16 rows
        (2, 2, 16, 2, [(1, 16), (1, 16)]),
        (2, 2, 20, 1, [(1, 16), (1, 4)]),  # more samples than rows
        (1, 2, 3, 4, [(2, 3), (2, 3)]),  # 3 do not divide 8
    ],
)
def test_an_evaluation_decodes_four_times_the_rows_of_training(
        tiny, monkeypatch, P, G, samples, problems, expected):  # fmt: skip
    """Fault: decoding costs the same for four times the rows, or they do not fit in memory."""
    shapes = []

    def rollout(model, tokenizer, problems, samples, args, streams):
        assert len(problems) == len(streams)
        shapes.append((len(problems), samples))
        size = len(problems) * samples
        return grpo.Batch(mask=torch.ones(size, 1, dtype=torch.bool), texts=["\\boxed{3}"] * size)

    monkeypatch.setattr(grpo, "rollout", rollout)
    args = arguments(prompts_per_step=P, group_size=G, eval_samples=samples)
    grpo.evaluate(*tiny, encoded(tiny[1], ["1+2="] * problems), args, Notes(4 * P * G))
    assert shapes == expected
    assert all(prompts * samples <= 4 * P * G for prompts, samples in shapes)


def test_an_evaluation_in_other_chunks_is_the_same(tiny, tmp_path):
    """Fault: the draws of a held-out problem depend on P, G or how many fit into a chunk."""
    model, tokenizer = tiny
    problems = encoded(tokenizer, QUESTIONS)
    results = []
    for P in 1, 8:
        notes = Notes(4 * P * 2)
        args = arguments(prompts_per_step=P, group_size=2, eval_samples=4)
        grpo.evaluate(model, tokenizer, problems, args, notes)
        results.append(notes.rewards)
    assert results[0] == results[1] and 0 < sum(map(sum, results[0])) < 16


def test_training_is_the_same_with_and_without_evaluations(data, tmp_path):
    """Fault: evaluating more often changes the run."""
    weights = []
    never = ["--dataset", f"{data}/train.jsonl"]  # a file alone has no held-out problems
    for name, flags in ("often", ["--eval_every", 1]), ("never", never):
        run(data, tmp_path / name, "--steps", 2, *flags)
        weights.append((tmp_path / name / "checkpoint-2/model.safetensors").read_bytes())
    assert len(list((tmp_path / "often").glob("eval-*"))) == 3
    assert not list((tmp_path / "never").glob("eval-*"))
    assert weights[0] == weights[1]
