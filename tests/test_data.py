"""Problems: columns, golds, bad files, prompts, benchmarks by name, order of training, pass@k (FAULTS 24, 39-43)."""

import copy
import itertools
import json
import math
from dataclasses import replace

import pytest
import transformers
from tokenizers.processors import TemplateProcessing

import common
import grpo
from common import BadInput, encode_prompt


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(grpo.TINY_DIR)


def problems(source, tokenizer, config=None, split="train", **given):
    return grpo.load_problems(str(source), config, split, tokenizer, replace(grpo.parse_args([]), **given))


def written(folder, *rows):
    """A .jsonl file of these rows; a string is a line as it is."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


# --- columns and golds ---


@pytest.mark.parametrize("question", ["question", "problem", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "solution"])
def test_39_column_names(tokenizer, tmp_path, question, answer):
    """Fault: only one dataset's column names are known."""
    path = written(tmp_path, {"id": 7, question: "3+4=", answer: "7"})
    (problem,) = problems(path, tokenizer)
    assert problem == {"question": "3+4=", "answer": "7", "prompt_ids": tokenizer("3+4=").input_ids}


def test_39_the_answer_column_is_preferred_to_the_solution(tokenizer, tmp_path):
    """Fault: of MATH-500's columns the worked solution is taken for the answer."""
    path = written(tmp_path, {"problem": "3+4=", "solution": "seven words that say how", "answer": "7"})
    assert problems(path, tokenizer)[0]["answer"] == "7"


GOLDS = {27.0: "27", 0.5: "0.5", -3: "-3", "So.\n#### 1,234": "1,234", r"Thus \boxed{\frac{1}{2}}.": r"\frac{1}{2}"}


@pytest.mark.parametrize("raw, gold", GOLDS.items())
def test_39_forms_of_golds(tokenizer, tmp_path, raw, gold):
    """Fault: float columns and GSM8K's solutions never match an answer."""
    path = written(tmp_path, {"question": "q", "answer": raw})
    assert problems(path, tokenizer)[0]["answer"] == gold
    assert common.verify(rf"\boxed{{{gold}}}", gold) == 1


BAD_ROWS = {
    "unreadable gold": ({"question": "b", "answer": "  "}, "train row 2.*gold"),
    "no gold": ({"question": "b", "answer": None}, "train row 2.*gold"),
    "gold column gone": ({"question": "b"}, "train row 2"),
    "question column gone": ({"answer": "1"}, "train row 2.*question"),
    "question is none": ({"question": None, "answer": "1"}, "train row 2.*question"),
    "question is empty": ({"question": " ", "answer": "1"}, "train row 2.*question"),
    "question is half a character": ('{"question": "\\ud800 1+1=", "answer": "2"}', "train row 2.*surrogate"),
    "question is a chat": ({"question": [{"role": "user", "content": "b"}], "answer": "1"}, "train row 2.*question"),
    "broken line": ('{"question": "b", "ans', "line 2"),
    "a number": ("42", "line 2"),
    "a list": ("[1, 2]", "line 2"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_24_a_bad_row_is_named(tokenizer, tmp_path, bad):
    """Fault: a row that cannot be used is a traceback, or passes and earns a wrong reward."""
    row, named = BAD_ROWS[bad]
    path = written(tmp_path, {"question": "a", "answer": "1"}, row, {"question": "c", "answer": "1"})
    with pytest.raises(BadInput, match=named) as error:
        problems(path, tokenizer)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_39_missing_columns_are_named_beside_the_found_ones(tokenizer, tmp_path):
    """Fault: KeyError: 'question'."""
    path = written(tmp_path, {"query": "a", "response": "b"})
    with pytest.raises(BadInput, match=r"'query', 'response'.*question\|problem\|prompt, answer\|solution"):
        problems(path, tokenizer)


def test_39_an_empty_file_is_said(tokenizer, tmp_path):
    """Fault: an empty dataset is an IndexError or a run of zero steps."""
    with pytest.raises(BadInput, match="0 rows"):
        problems(written(tmp_path), tokenizer)


def test_40_over_long_prompts_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    """Fault: long prompts are cut, or go in silence."""
    path = written(tmp_path, *({"question": "1" * length, "answer": "1"} for length in (4, 5, 6, 7)))
    assert [len(p["prompt_ids"]) for p in problems(path, tokenizer, max_prompt_tokens=5)] == [4, 5]
    assert "dropped 2 of 4 prompts" in capsys.readouterr().out
    problems(path, tokenizer, max_prompt_tokens=7)
    assert capsys.readouterr().out == ""


def test_41_fewer_prompts_than_a_step_needs_is_said(data, tmp_path):
    """Fault: fewer prompts than a step takes is a run of zero steps."""
    flags = ["--dataset", data, "--output_dir", str(tmp_path), "--prompts_per_step"]
    with pytest.raises(BadInput, match="40 usable prompts.*--prompts_per_step"):
        grpo.main(grpo.parse_args([*flags, "41"]))


def test_39_a_folder_with_train_and_test(data, tokenizer):
    """Fault: both splits of a folder are the same file."""
    train, test = (problems(data, tokenizer, split=split) for split in ("train", "test"))
    assert len(train) == 40 and len(test) == 8
    assert not {problem["question"] for problem in train} & {problem["question"] for problem in test}


def test_39_a_folder_without_the_split_is_said(tokenizer, tmp_path):
    """Fault: a traceback for a folder that holds something else."""
    with pytest.raises(BadInput, match="test.jsonl"):
        problems(tmp_path, tokenizer, split="test")


# --- the hub ---

HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test", {"question": "q", "answer": "So.\n#### 1,234"}, "1,234"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", {"problem": "q", "solution": "by words", "answer": "3"}, "3"),
    "amc23": ("math-ai/amc23", None, "test", {"id": 0, "question": "q", "answer": "27.0"}, "27.0"),
    "minerva": ("math-ai/minervamath", None, "test", {"question": "q", "answer": "4.5e33"}, "4.5e33"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", {"problem": "q", "solution": "words", "answer": "204"}, "204"),
    "aime25": ("math-ai/aime25", None, "test", {"problem": "q", "answer": "70"}, "70"),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_benchmarks_by_name(tokenizer, monkeypatch, name):
    """Fault: a benchmark's name is not its hub id, or its columns are not read."""
    hub_id, config, split, row, gold = HUB[name]
    calls = []
    monkeypatch.setattr(common, "load_dataset", lambda *given, **more: calls.append((given, more)) or [row])
    (problem,) = problems(name, tokenizer, "main", "test")
    assert calls == [((hub_id, config), {"split": split})]
    assert (problem["question"], problem["answer"]) == ("q", gold)


def test_a_benchmarks_hub_id_has_its_configuration_too(tokenizer, monkeypatch):
    """Fault: --eval_dataset openai/gsm8k is asked for without a configuration, and that set has no default one."""
    calls, row = [], {"question": "q", "answer": "1"}
    monkeypatch.setattr(common, "load_dataset", lambda *given, **more: calls.append(given) or [row])
    for config in (None, "socratic"):
        problems("openai/gsm8k", tokenizer, config, "test")
    problems("some/set", tokenizer, None, "test")
    assert calls == [("openai/gsm8k", "main"), ("openai/gsm8k", "socratic"), ("some/set", None)]


def test_a_benchmarks_name_does_not_train_on_its_test_split(tokenizer, monkeypatch):
    """Fault: --dataset gsm8k trains on the problems that it is evaluated on."""
    calls, row = [], {"question": "q", "answer": "1"}
    monkeypatch.setattr(common, "load_dataset", lambda *given, **more: calls.append((given, more)) or [row])
    problems("gsm8k", tokenizer, "main")
    assert calls[0][1] == {"split": "train"}


def test_a_hub_dataset_takes_its_configuration_and_split(tokenizer, monkeypatch):
    """Fault: the configuration or the split is lost on the way to the hub."""
    calls, row = [], {"question": "q", "answer": "1"}
    monkeypatch.setattr(common, "load_dataset", lambda *given, **more: calls.append((given, more)) or [row])
    problems("some/set", tokenizer, "socratic")
    assert calls == [(("some/set", "socratic"), {"split": "train"})]


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach the Hub\nmore"), ConnectionError(), KeyError("x")])
def test_an_unreachable_hub_is_one_sentence(tokenizer, monkeypatch, error):
    """Fault: no network is a traceback of a hundred lines."""
    def fails(*given, **more):
        raise error

    monkeypatch.setattr(common, "load_dataset", fails)
    with pytest.raises(BadInput, match=r"^cannot read the dataset some/set: [^\n]+$"):
        problems("some/set", tokenizer, "main")


# --- prompts ---


def with_bos(tokenizer):
    """The tokenizer, adding a BOS to every text, as Llama's and Gemma's do."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokenizer("a").input_ids == [bos, ord("a")]
    return tokenizer


def test_42_exactly_one_bos_with_a_chat_template(tokenizer):
    """Fault: the template writes a BOS and the tokenizer adds another."""
    tokenizer = with_bos(tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ids = encode_prompt(tokenizer, "3+4=")
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "user: 3+4=\nassistant: "


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('roles must alternate') }}"])
def test_a_chat_template_that_fails_is_one_sentence(tokenizer, template):
    """Fault: a traceback out of jinja2."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(BadInput, match="chat template"):
        encode_prompt(tokenizer, "3+4=")


def test_42_exactly_one_bos_without_a_chat_template(tokenizer):
    """Fault: without a template the prompt crashes, or has no BOS, or two."""
    tokenizer = with_bos(tokenizer)
    tokenizer.chat_template = None
    ids = encode_prompt(tokenizer, "3+4=")
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == "Question: 3+4=\nAnswer:"


def test_42_the_instruction_follows_the_question(tokenizer, tmp_path):
    """Fault: the instruction is lost, or an empty one leaves a line break."""
    path = written(tmp_path, {"question": "3+4=", "answer": "7"})
    for instruction, text in ("Be brief.", "3+4=\nBe brief."), ("", "3+4="):
        (problem,) = problems(path, tokenizer, instruction=instruction)
        assert tokenizer.decode(problem["prompt_ids"]) == text and problem["question"] == "3+4="


# --- the order of training ---


def test_each_prompt_is_met_once_an_epoch(data, tmp_path, monkeypatch):
    """Fault: where P does not divide the number of problems some are never met, or all epochs have one order."""
    met = []

    def rollout(model, tokenizer, prompts, samples, *rest, real=grpo.rollout):
        if samples == 2:  # an evaluation draws one
            met.extend(map(tuple, prompts))
        return real(model, tokenizer, prompts, samples, *rest)

    monkeypatch.setattr(grpo, "rollout", rollout)
    flags = "--prompts_per_step 16 --group_size 2 --max_new_tokens 1 --steps 5 --eval_samples 1".split()
    for seed in "0", "1":
        grpo.main(grpo.parse_args([*flags, "--dataset", data, "--output_dir", str(tmp_path / seed), "--seed", seed]))
    epochs = [met[i : i + 40] for i in range(0, 160, 40)]
    assert all(len(set(epoch)) == 40 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4  # each seed and each epoch has an order of its own


# --- pass@k ---


def test_43_pass_at_k_against_brute_force():
    """Fault: pass@k is biased, or wrong where all or none are right."""
    assert grpo.pass_at_k(4, 1, 4) == 1 and grpo.pass_at_k(2, 0, 2) == 0
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert math.isclose(grpo.pass_at_k(n, c, k), sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="at least 3 samples"):
        grpo.pass_at_k(2, 1, 3)
