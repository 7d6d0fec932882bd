"""Problems: columns, golds, bad files, the hub, prompts, the order of training, pass@k."""

import copy
import itertools
import json
import math
import time

import pytest
import transformers
from conftest import TINY, evaluation_lines, parse, run, training_lines
from tokenizers.processors import TemplateProcessing

import common
import grpo
from common import BadInput, load_rows, readable_golds


def written(folder, *rows, name="rows.jsonl"):
    """A .jsonl file of these rows; a string is a line as it is."""
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def golds(path):
    return [row["answer"] for row in readable_golds(load_rows(str(path), "train"), str(path))]


def train(source, tokenizer, *flags):
    """The training problems of a script."""
    args = parse("--dataset", source, "--prompts_per_step", 1, *flags)
    return grpo.load_problems(tokenizer, args)[0]


# --- columns and golds ---


@pytest.mark.parametrize("question", ["question", "problem", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "solution"])
def test_39_column_names(tmp_path, question, answer):
    """Fault: only one dataset's column names are known, or the other columns are lost."""
    path = written(tmp_path, {"id": 7, "nums": [3, 4], question: "3+4=", answer: "7"})
    (row,) = load_rows(str(path), "train")
    assert row == {"id": 7, "nums": [3, 4], question: "3+4=", answer: "7"} | {
        "question": "3+4=", "answer": "7"}  # fmt: skip


def test_39_the_answer_column_is_preferred_to_the_solution(tmp_path):
    """Fault: of MATH-500's columns the worked solution is taken for the answer."""
    row = {"problem": "3+4=", "solution": "seven words that say how", "answer": "7"}
    assert golds(written(tmp_path, row)) == ["7"]


GOLDS = {
    27.0: "27", 0.5: "0.5", -3: "-3", "So.\n#### 1,234": "1,234",
    r"Thus \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
}  # fmt: skip


@pytest.mark.parametrize("raw, gold", GOLDS.items())
def test_39_forms_of_golds(tmp_path, raw, gold):
    """Fault: float columns and GSM8K's solutions never match an answer."""
    assert golds(written(tmp_path, {"question": "q", "answer": raw})) == [gold]


@pytest.mark.parametrize("unreadable", ["  ", None, {}], ids=repr)
def test_24_and_55_a_few_unreadable_golds_are_counted_and_dropped(tmp_path, capsys, unreadable):
    """Fault: one bad row of thousands ends the run, earns a reward, or goes in silence."""
    rows = [{"question": f"{i}+1=", "answer": i + 1} for i in range(21)]
    rows[3]["answer"] = rows[5]["answer"] = unreadable  # 2 of 21
    path = written(tmp_path, *rows)
    assert golds(path) == [str(i + 1) for i in range(21) if i not in (3, 5)]
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 and f"{path}: 2 of 21 rows" in out and "3+1=" in out


@pytest.mark.parametrize("bad", [2, 20])
def test_24_and_55_a_tenth_of_unreadable_golds_is_an_error(tmp_path, bad):
    """Fault: a wrong column is dropped row by row until little or nothing is left."""
    rows = [{"question": f"{i}+1=", "answer": i + 1} for i in range(20)]
    for row in rows[:bad]:
        row["answer"] = None
    with pytest.raises(BadInput, match=rf"{bad} of 20 rows.*'question', 'answer'") as error:
        golds(written(tmp_path, *rows))
    assert "\n" not in str(error.value)


def test_39_a_missing_answer_column_is_named_beside_the_found_ones(tmp_path):
    """Fault: KeyError: 'answer'."""
    path = written(tmp_path, {"question": "a", "response": "b"})
    with pytest.raises(BadInput, match=r"\['question', 'response'\], needed: answer or solution"):
        golds(path)


BAD_ROWS = {
    "question column gone": ({"answer": "1"}, "train row 2.*question"),
    "question is none": ({"question": None, "answer": "1"}, "train row 2.*question"),
    "question is empty": ({"question": " ", "answer": "1"}, "train row 2.*question"),
    "question is a number": ({"question": 7, "answer": "1"}, "train row 2.*question"),
    "half a character": ('{"question": "\\ud800 1+1=", "answer": "2"}', "train row 2.*a text"),
    "an empty chat": ({"question": [], "answer": "1"}, "train row 2.*question"),
    "a chat without text": ({"question": [{"role": "user"}]}, "train row 2.*question"),
    "a first turn without text": (
        {"question": [{"role": "system"}, {"role": "user", "content": "b"}]}, "train row 2.*quest"),
    "a turn of parts": (
        {"question": [{"role": "user", "content": [{"type": "image"}]}]}, "train row 2.*question"),
    "a chat that ends with an answer": (
        {"question": [{"role": r, "content": "a"} for r in ("user", "assistant")]}, "row 2.*quest"),
    "a chat of texts": ({"question": ["a", "b"]}, "train row 2.*question"),
    "broken line": ('{"question": "b", "ans', "line 2"),
    "a number": ("42", "line 2"),
    "a list": ("[1, 2]", "line 2"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_39_a_bad_row_is_named(tmp_path, bad):
    """Fault: a row that cannot be used is a traceback, or trains on nonsense."""
    row, named = BAD_ROWS[bad]
    good = {"question": "a", "answer": "1"}
    path = written(tmp_path, good, row, good)
    with pytest.raises(BadInput, match=named) as error:
        load_rows(str(path), "train")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_39_an_empty_question_gives_way_to_the_next_column(tmp_path):
    """Fault: a column question that is null hides the column problem."""
    path = written(tmp_path, {"question": None, "problem": "3+4=", "answer": "7"})
    assert load_rows(str(path), "train")[0]["question"] == "3+4="


def test_39_missing_columns_are_named_beside_the_found_ones(tmp_path):
    """Fault: KeyError: 'question'."""
    path = written(tmp_path, {"query": "a", "response": "b"})
    with pytest.raises(BadInput, match=r"'query', 'response'.*question\|problem\|prompt"):
        load_rows(str(path), "train")


def test_39_an_empty_file_is_said(data, tmp_path):
    """Fault: an empty dataset is an IndexError or a run of zero steps."""
    empty = written(tmp_path)
    for flag in "--dataset", "--eval_dataset":
        with pytest.raises(BadInput, match=f"{empty} has no rows"):
            run(data, tmp_path / "out", flag, empty)


def test_40_over_long_prompts_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    """Fault: long prompts are cut, or go in silence."""
    rows = [{"question": "1" * length, "answer": "1"} for length in (4, 5, 6, 7)]
    path = written(tmp_path, *rows)
    found = train(path, tokenizer, "--max_prompt_tokens", 5)
    assert [len(problem["prompt_ids"]) for problem in found] == [4, 5]
    assert "dropped 2 of 4 prompts" in capsys.readouterr().out
    train(path, tokenizer, "--max_prompt_tokens", 7)
    assert "dropped" not in capsys.readouterr().out


def test_41_fewer_prompts_than_a_step_needs_is_said(data, tmp_path):
    """Fault: fewer prompts than a step takes is a run of zero steps."""
    with pytest.raises(BadInput, match="40 usable prompts.*--prompts_per_step 41"):
        run(data, tmp_path, "--prompts_per_step", 41)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    path = written(tmp_path, *rows, {"question": "1+1=", "answer": None})
    with pytest.raises(BadInput, match="1 of 21 rows .* fewer than --prompts_per_step 21"):
        run(path, tmp_path / "out", "--prompts_per_step", 21)


# --- files ---


def test_39_a_folder_with_train_and_test(data):
    """Fault: both splits of a folder are the same file."""
    questions = [{row["question"] for row in load_rows(data, split)} for split in ("train", "test")]
    assert list(map(len, questions)) == [40, 8] and not questions[0] & questions[1]


def test_39_a_folder_without_the_split_is_said(tmp_path):
    """Fault: a traceback for a folder that holds something else."""
    for split in "train", "test":
        with pytest.raises(BadInput, match=f"{split}.jsonl"):
            load_rows(str(tmp_path), split)


def test_62_a_byte_order_mark(tmp_path):
    """Fault: a file that a Windows editor saved is refused, or its first column is unknown."""
    text = '{"question": "≈3+4=", "answer": "7"}\r\n'
    for encoding in "utf-8", "utf-8-sig":
        (tmp_path / "rows.jsonl").write_bytes((text * 2).encode(encoding))
        rows = load_rows(str(tmp_path / "rows.jsonl"), "train")
        assert rows == [{"question": "≈3+4=", "answer": "7"}] * 2


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_62_another_encoding_is_one_sentence(tmp_path, encoding):
    """Fault: UnicodeDecodeError, or wrong characters in silence."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"question": "é", "answer": "7"}'.encode(encoding))
    with pytest.raises(BadInput, match=f"cannot read the dataset {path}.*utf-8"):
        load_rows(str(path), "train")


def test_62_line_breaks_inside_a_text_are_no_ends_of_lines(tmp_path):
    """Fault: a line separator that stands in a question breaks its row in two."""
    question = "a\u2028b\u0085c\x0cd"
    text = json.dumps({"question": question, "answer": "7"}, ensure_ascii=False)
    assert load_rows(str(written(tmp_path, text)), "train")[0]["question"] == question


def test_61_the_suffix_in_capitals(data, tmp_path, tokenizer):
    """Fault: x.JSONL is looked for on the hub."""
    path = written(tmp_path, {"question": "3+4=", "answer": "7"}, name="X.JSONL")
    assert len(load_rows(str(path), "train")) == 1
    run(path, tmp_path / "out", "--prompts_per_step", 1, "--steps", 1)  # and it has no test split
    assert not evaluation_lines(tmp_path / "out")


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.parquet", "x"])
def test_61_an_existing_file_of_another_kind(tmp_path, monkeypatch, name):
    """Fault: a file that exists "could not be found", after the hub was asked for it."""
    monkeypatch.setattr(common, "load_dataset", None)
    (tmp_path / name).write_text('[{"question": "3+4=", "answer": "7"}]')
    with pytest.raises(BadInput, match=f"{name}: a dataset is a .jsonl file, a folder with"):
        load_rows(str(tmp_path / name), "train")


# --- the hub ---


@pytest.fixture
def hub(monkeypatch):
    """A hub that has these splits of every set; what it was asked for is in hub.calls."""

    class Hub:
        splits = {"train": [{"question": "q", "answer": "1"}] * 4}
        splits["test"] = [{"question": "t", "answer": "2"}]

        def __init__(self):
            self.calls = []

        def load_dataset(self, name, config=None, split=None):
            self.calls.append((name, config, split))
            if split not in self.splits:  # in the words of the library
                raise ValueError(f'Unknown split "{split}". Should be one of {[*self.splits]}.')
            return [dict(row) for row in self.splits[split]]

    hub = Hub()
    monkeypatch.setattr(common, "load_dataset", hub.load_dataset)
    return hub


HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test", {"question": "q", "answer": "So.\n#### 1,234"}),
    "math500": (
        "HuggingFaceH4/MATH-500", None, "test",
        {"problem": "q", "solution": "by words", "answer": "1,234"}),
    "amc23": ("math-ai/amc23", None, "test", {"id": 0, "question": "q", "answer": 1234.0}),
    "minerva": ("math-ai/minervamath", None, "test", {"question": "q", "answer": "1234"}),
    "aime24": (
        "HuggingFaceH4/aime_2024", None, "train",
        {"problem": "q", "solution": "words", "answer": "1234"}),
    "aime25": ("math-ai/aime25", None, "test", {"problem": "q", "answer": "1234"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_benchmarks_by_name(hub, name):
    """Fault: a benchmark's name is not its hub id, or its columns are not read."""
    *call, row = HUB[name]
    hub.splits = {call[2]: [row]}
    rows = readable_golds(load_rows(name, "test"), name)
    assert hub.calls == [tuple(call)]
    assert rows[0]["question"] == "q" and rows[0]["answer"].replace(",", "") == "1234"


def test_a_benchmarks_name_does_not_train_on_its_test_split(hub):
    """Fault: --dataset gsm8k trains on the problems that it is evaluated on."""
    load_rows("gsm8k", "train")
    assert hub.calls[0][2] == "train"


def test_47_a_configuration_is_main_for_gsm8k_alone(hub):
    """Fault: "BuilderConfig 'main' not found", or the configuration asked for is lost."""
    for source in "openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:socratic":
        load_rows(source, "test")
    for source in "some/set", "some/set:algebra":
        load_rows(source, "train")
    assert hub.calls == [
        ("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "socratic", "test"), ("some/set", None, "train"),
        ("some/set", "algebra", "train")]  # fmt: skip


def test_47_a_set_with_a_train_split_only_trains(hub, tmp_path, capsys):
    """Fault: Unknown split "test", although there is enough to train on."""
    del hub.splits["test"]
    run("owner/set", tmp_path, "--steps", 1)
    assert len(training_lines(tmp_path)) == 1 and not evaluation_lines(tmp_path)
    out = capsys.readouterr().out
    assert "no evaluation" in out and "--eval_dataset" in out


@pytest.mark.parametrize("flags", [["--steps", 0], ["--eval_dataset", "owner/other"]])
def test_47_where_an_evaluation_is_asked_for_it_needs_a_test_split(hub, tmp_path, flags):
    """Fault: an evaluation of nothing, exit code 0."""
    del hub.splits["test"]
    with pytest.raises(BadInput, match="owner/(set|other) has no held-out problems.*--eval_data"):
        run("owner/set", tmp_path, *flags)


def test_47_an_error_on_the_hub_is_not_a_missing_split(monkeypatch, tmp_path):
    """Fault: without a network a run goes on without its evaluation."""

    def load_dataset(name, config, split):
        if split == "test":
            raise ConnectionError("Couldn't reach the Hub")
        return [{"question": "q", "answer": "1"}] * 4

    monkeypatch.setattr(common, "load_dataset", load_dataset)
    with pytest.raises(BadInput, match="reach the Hub"):
        run("owner/set", tmp_path, "--steps", 1)


@pytest.mark.parametrize("error", [
    ConnectionError("Couldn't reach the Hub\nmore"), ConnectionError(), KeyError("x"),
], ids=repr)  # fmt: skip
def test_an_unreachable_hub_is_one_sentence(monkeypatch, error):
    """Fault: no network is a traceback of a hundred lines."""
    def fails(*given, **more):
        raise error

    monkeypatch.setattr(common, "load_dataset", fails)
    with pytest.raises(BadInput, match=r"^cannot read the dataset some/set: [^\n]+$"):
        load_rows("some/set", "train")


# --- prompts ---


def encode(tokenizer, question, *flags):
    """The token ids of one prompt, without an instruction unless there is one in flags."""
    (ids,) = common.encode_prompts(tokenizer, [question], parse(*flags))
    return ids


def adding(tokenizer, single, *tokens):
    """The tokenizer with special tokens, added to every text as single says."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    processor = TemplateProcessing(single=single, special_tokens=pairs)
    tokenizer.backend_tokenizer.post_processor = processor
    assert len(tokenizer("a").input_ids) == 1 + len(tokens)
    return tokenizer


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_42_exactly_one_bos_with_a_chat_template(tokenizer):
    """Fault: the template writes a BOS and the tokenizer adds another."""
    tokenizer = adding(tokenizer, "<s> $A", "<s>")
    tokenizer.chat_template = TEMPLATE
    ids = encode(tokenizer, "3+4=")
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "user: 3+4=\nassistant: "


def test_42_exactly_one_bos_without_a_chat_template(tokenizer):
    """Fault: without a template the prompt crashes, or has no BOS, or two."""
    tokenizer = adding(tokenizer, "<s> $A", "<s>")
    ids = encode(tokenizer, "3+4=")
    assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert tokenizer.decode(ids[1:]) == "Question: 3+4=\nAnswer:"


@pytest.mark.parametrize("single, tokens", [
    ("$A </s>", ["</s>"]), ("<s> $A </s>", ["<s>", "</s>"]),
])  # fmt: skip
def test_49_a_tokenizer_that_appends_eos(tokenizer, single, tokens):
    """Fault: the prompt ends with eos, after which there is nothing to answer."""
    tokenizer = adding(tokenizer, single, *tokens)
    ids = encode(tokenizer, "3+4=")
    assert tokenizer.eos_token_id not in ids
    assert (ids[0] == tokenizer.bos_token_id) == (len(tokens) == 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Question: 3+4=\nAnswer:"
    tokenizer.chat_template = TEMPLATE + "</s>"  # what a template writes stays
    assert encode(tokenizer, "3+4=")[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('roles must alternate') }}"])
def test_a_chat_template_that_fails_is_one_sentence(tokenizer, template):
    """Fault: a traceback out of jinja2."""
    tokenizer.chat_template = template
    with pytest.raises(BadInput, match="chat template fails: [^\n]+$"):
        encode(tokenizer, "3+4=")


def test_a_chat_template_that_writes_nothing_leaves_no_prompts(tokenizer, capsys):
    """Fault: an empty prompt is max() of an empty sequence."""
    tokenizer.chat_template = "{{ '' }}"
    rows = [{"question": "3+4=", "answer": "7"}]
    assert common.add_prompts(rows, tokenizer, parse()) == []
    assert "dropped 1 of 1 prompts, empty or longer than" in capsys.readouterr().out


def test_42_the_instruction_follows_the_question(tokenizer):
    """Fault: the instruction is lost, or an empty one leaves a line break."""
    for instruction, text in ("Be brief.", "3+4=\nBe brief."), ("", "3+4="):
        ids = encode(tokenizer, "3+4=", "--instruction", instruction)
        assert tokenizer.decode(ids) == text


def test_a_list_of_messages_is_a_prompt(tokenizer):
    """Fault: a chat is written out as a Python list, or loses its system message."""
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
    before = copy.deepcopy(chat)
    flags = ["--instruction", "Be brief."]
    tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    text = tokenizer.decode(encode(tokenizer, chat, *flags))
    assert text == "system: Add.\nuser: 3+4=\nBe brief.\nassistant: "
    tokenizer.chat_template = None
    text = tokenizer.decode(encode(tokenizer, chat, *flags))
    assert text == "Question: Add.\n3+4=\nBe brief.\nAnswer:"
    assert chat == before


THINKING = TEMPLATE.replace("{{ bos_token }}", "").replace(
    "assistant: {% endif %}", "assistant: {% if not thinking %}none{% endif %}{% endif %}")
END = "{% if end and not add_generation_prompt %}{{ end }}{% endif %}"


def test_64_variables_reach_the_chat_template_everywhere(tokenizer):
    """Fault: no way to switch thinking off; or off in prompts, but not where stop ids are found."""
    tokenizer.chat_template = THINKING
    assert tokenizer.decode(encode(tokenizer, "1")) == "user: 1\nassistant: none"
    flags = ["--chat_template_kwargs", '{"thinking": true, "end": "<|im_end|>"}']
    assert tokenizer.decode(encode(tokenizer, "1", *flags)) == "user: 1\nassistant: "
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{{ end }}{% endfor %}"
    )
    model = common.load_model(str(TINY), "cpu")[0]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in common.stop_token_ids(model, tokenizer, parse(*flags))
    assert end not in common.stop_token_ids(model, tokenizer, parse())


def test_64_a_run_with_variables(tmp_path, data, tiny, capsys):
    """Fault: the flag is read, and lost on the way to the prompts."""
    model, tokenizer = copy.deepcopy(tiny)
    tokenizer.chat_template = "{{ prefix }}{{ messages[0]['content'] }}"
    for part in model, tokenizer:
        part.save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--device", "cpu", "--instruction", "", "--steps", 0]
    flags += ["--max_prompt_tokens", 48, "--eval_problems", 1, "--chat_template_kwargs"]
    run(data, tmp_path / "short", *flags, json.dumps({"prefix": "1"}))
    assert "dropped" not in capsys.readouterr().out
    with pytest.raises(BadInput, match=f"{data} has no held-out problems"):
        run(data, tmp_path / "long", *flags, json.dumps({"prefix": "1" * 48}))
    assert "dropped 8 of 8 prompts" in capsys.readouterr().out


DATES = {
    "{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}": "DATE",
    "{{ strftime_now('%B %d, %Y') }}": "DATE",
    "\n{{ strftime_now(\"%A, %-d-%m-%y\") }}": "\nDATE",
    "{% macro day(x) %}{{ strftime_now(x) }}{% endmacro %}{{ day('%Y-%m-%d %H:%M') }}": "DATE",
}


@pytest.mark.parametrize("template", DATES)
def test_60_the_prompt_does_not_depend_on_the_day(tokenizer, monkeypatch, template):
    """Fault: a template writes today's date, so the prompt changes with the day and time zone."""
    import datetime

    class Day(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(*today)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Day)
    tokenizer.chat_template = template + "{{ messages[0]['content'] }}"
    chat = [{"role": "user", "content": "3+4="}]
    prompts, unprotected = set(), set()
    for today, zone in ((2025, 12, 31, 23, 5), "UTC"), ((2026, 1, 1, 7, 40), "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        prompts.add(tokenizer.decode(encode(tokenizer, "3+4=")))
        unprotected.add(tokenizer.apply_chat_template(chat, tokenize=False))
    monkeypatch.delenv("TZ")
    time.tzset()
    assert len(unprotected) == 2  # the days do differ here
    assert prompts == {DATES[template].replace("DATE", common.PROMPT_DATE) + "3+4="}


def test_60_a_template_without_a_date_is_rendered_as_ever(tokenizer):
    """Fault: what fixes the date also moves line breaks or spaces of the template."""
    chat = [{"role": "user", "content": "3+4="}]
    for start in "\n", "\n\n", "  ", "  {% if true %}x{% endif %}", "{%- if true %}\nx{% endif %}":
        tokenizer.chat_template = start + TEMPLATE
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert encode(tokenizer, "3+4=") == tokenizer(text, add_special_tokens=False).input_ids


def test_60_the_date_is_kept_with_the_run(data, tmp_path):
    """Fault: a resume with another fixed date is taken for the same run."""
    run(data, tmp_path, "--steps", 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["date"] == common.PROMPT_DATE
    (tmp_path / "config.json").write_text(json.dumps(config | {"date": "2020-01-01"}))
    with pytest.raises(BadInput, match="another one.*date.*2020-01-01"):
        run(data, tmp_path, "--steps", 2, "--resume")


# --- ids outside the embedding ---


def saved(folder, model, tokenizer):
    for part in model, tokenizer:
        part.save_pretrained(folder)
    return ["--model", folder, "--device", "cpu", "--instruction", ""]


def test_48_a_pad_token_outside_the_embedding(data, tmp_path, tiny):
    """Fault: IndexError in the rollout for an added pad token, although padding is masked."""
    model, tokenizer = copy.deepcopy(tiny)
    rows = model.get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<filler{i}>" for i in range(rows - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= rows
    flags = saved(tmp_path / "model", model, tokenizer)
    run(data, tmp_path / "out", *flags, "--steps", 1, "--learning_rate", 3e-4)
    run(data, tmp_path / "usual", "--steps", 1)
    lines = [training_lines(tmp_path / name)[0] for name in ("out", "usual")]
    assert lines[0]["reward"] == lines[1]["reward"]
    assert lines[0]["loss"] == lines[1]["loss"]
    files = [tmp_path / name / "tokenizer_config.json" for name in ("model", "out/checkpoint-1")]
    assert [json.loads(file.read_text())["pad_token"] for file in files] == ["[PAD]"] * 2


def test_48_a_prompt_token_outside_the_embedding(tmp_path, tiny):
    """Fault: IndexError in the middle of training, for one prompt with an added token."""
    model, tokenizer = copy.deepcopy(tiny)
    rows = model.get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<filler{i}>" for i in range(rows + 1 - len(tokenizer))])
    added = tokenizer.convert_ids_to_tokens(rows)
    flags = saved(tmp_path / "model", model, tokenizer)
    for split, other in ("train", "test"), ("test", "train"):
        written(tmp_path, {"question": f"3{added}4=", "answer": "7"}, name=f"{split}.jsonl")
        written(tmp_path, {"question": "3+4=", "answer": "7"}, name=f"{other}.jsonl")
        with pytest.raises(BadInput, match=f"token id {rows}, but .* knows only {rows}$"):
            run(tmp_path, tmp_path / "out", *flags, "--prompts_per_step", 1, "--steps", 1)
    assert not (tmp_path / "out/metrics.jsonl").exists()


# --- the order of training ---


def test_each_prompt_is_met_once_an_epoch(data, tmp_path, monkeypatch):
    """Fault: where P does not divide the number of problems some are never met, or all epochs have
    one order."""
    met = []

    def rollout(model, tokenizer, problems, samples, *rest, real=grpo.rollout):
        if samples == 2:  # an evaluation draws one
            met.extend(problem["question"] for problem in problems)
        return real(model, tokenizer, problems, samples, *rest)

    monkeypatch.setattr(grpo, "rollout", rollout)
    flags = "--prompts_per_step 16 --group_size 2 --max_new_tokens 1 --eval_samples 1".split()
    for seed in 0, 1:
        run(data, tmp_path / str(seed), *flags, "--steps", 5, "--seed", seed)
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
