r"""Make tests/tiny: a small pretrained model and its problems, the offline default of every script.

The task is to add 2 to 4 digits: the question is `3+8+4=`, the answer `15`. The model is a Qwen2
with 0.3 M parameters that reads one character at a time. It is pretrained on demonstrations of four
kinds, so that it knows the right way but does not take it often enough. That leaves reinforcement
learning something to do.

    exact       3+8=11;11+4=15;\boxed{15}              step by step, always right
    guess       \boxed{21}                             mostly wrong
    careless    3+8=11;\boxed{11}                      the last term dropped, mostly wrong
    rambling    3+8=11;3+8=11;3+8=11;\boxed{21}        the first step 2 to 5 times, then a guess

    python tests/tools/make_tiny.py                      tests/tiny: 0.4 right when sampled at T = 1
    python tests/tools/make_tiny.py --weak               tests/tiny-weak: 0.1 right
    python tests/tools/make_tiny.py --rambling           tests/tiny-rambling: 0.3 right, wordy
    python tests/tools/make_tiny.py --exact 0.055 --guess_up_to 299     tests/tiny-0.055: 0.03 right
    python tests/tools/make_tiny.py --skilled --exact 0.03 --guess_up_to 299
                                        tests/tiny-0.03-skilled: 0.02 right, but it can add

Seeded: the same machine writes the same files. It takes about two and a half minutes on one core.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

TESTS = Path(__file__).resolve().parent.parent
TRAIN_PROBLEMS, TEST_PROBLEMS = 2000, 256
STEPS, BATCH, LEARNING_RATE = 1500, 64, 2e-3
AFTER_SKILL = 300  # steps on the mix after those on exact demonstrations alone

# Shares of the demonstrations by kind.
MIX = {"exact": 0.40, "guess": 0.45, "careless": 0.15}
WEAK = {"exact": 0.07, "guess": 0.78, "careless": 0.15}
RAMBLING = {"exact": 0.30, "guess": 0.35, "rambling": 0.35}

# Ids 0 to 255 are the bytes, so the id of an ASCII character is its code.
BOXED_ID, EOS_ID, PAD_ID = 256, 257, 258


# --- problems and demonstrations ---


def question_of(terms):
    return "+".join(map(str, terms)) + "="


def make_problems(rng):
    """Distinct problems, so that none of the test set can stand in the training set."""
    problems = {}
    while len(problems) < TRAIN_PROBLEMS + TEST_PROBLEMS:
        terms = [rng.randrange(10) for _ in range(rng.randint(2, 4))]
        problems[question_of(terms)] = terms
    problems = list(problems.values())
    # Two-term problems are few and were all met early on. Without shuffling, none of them would
    # reach the test set.
    rng.shuffle(problems)
    return problems[:TRAIN_PROBLEMS], problems[TRAIN_PROBLEMS:]


def step_by_step(terms):
    total, text = terms[0], ""
    for term in terms[1:]:
        text += f"{total}+{term}={total + term};"
        total += term
    return text + f"\\boxed{{{total}}}"


def demonstration(terms, mix, highest, rng):
    """A response to learn from; guesses go up to `highest`, or to 9 per term where it is None."""
    kind = rng.choices(list(mix), mix.values())[0]
    # The usual guess knows how many terms there are: 3 to 5 % of these are right by luck.
    guess = f"\\boxed{{{rng.randint(0, highest or 9 * len(terms))}}}"
    if kind == "exact":
        return step_by_step(terms)
    if kind == "guess":
        return guess
    if kind == "rambling":
        first, second = terms[:2]
        return f"{first}+{second}={first + second};" * rng.randint(2, 5) + guess
    # Right only where the last term is 0. Dropping a term in the middle instead teaches copying
    # mistakes, and the exact chains then make them too.
    return step_by_step(terms[:-1])


# --- tokenizer ---


def make_tokenizer():
    r"""A byte-level BPE without merges: one token per byte, and `\boxed{` is one token.

    AutoTokenizer reads a tokenizer saved beside model_type qwen2 as Qwen2's own class, which
    rebuilds everything from the vocabulary and the merges. So this one is made by that class in the
    first place: loading it again loses nothing.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    eos, pad = "<|endoftext|>", "<|pad|>"
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=None, eos_token=None, pad_token=None
    )
    # Not special: `skip_special_tokens=True` must leave the answer's box in the text.
    tokenizer.add_tokens([AddedToken("\\boxed{", normalized=False, special=False)])
    tokenizer.add_special_tokens({"eos_token": eos})
    tokenizer.add_special_tokens({"pad_token": pad})
    # The prompt is the question itself: no roles, no turns.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.model_max_length = 512
    tokenizer.padding_side = "left"
    return tokenizer


def check_tokenizer(tokenizer, texts):
    printable = "".join(map(chr, range(32, 127))) + "\n"
    for text in [*texts, printable, "  two  spaces,\ttab\r\n\n", "Let's see: naïve √2 ≈ 1.41 🙂"]:
        ids = tokenizer(text)["input_ids"]
        pieces = re.split(r"(\\boxed\{)", text)
        expected = []
        for piece in pieces:
            expected += [BOXED_ID] if piece == "\\boxed{" else piece.encode()
        assert ids == expected, (text, ids, expected)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOS_ID, PAD_ID, 259)
    messages = [{"role": "user", "content": "3+8+4="}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "3+8+4="


# --- model ---


def make_model():
    config = Qwen2Config(
        vocab_size=259,
        hidden_size=96,
        intermediate_size=224,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,  # the usual 0.02 suits wider models
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen2ForCausalLM(config)


def pretrain(model, tokenizer, held_out, mix, highest, steps, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    model.train()
    for step in range(1, steps + 1):
        rows = []
        while len(rows) < BATCH:
            terms = [rng.randrange(10) for _ in range(rng.randint(2, 4))]
            question = question_of(terms)
            if question in held_out:
                continue
            prompt = tokenizer.encode(question)
            response = tokenizer.encode(demonstration(terms, mix, highest, rng))
            rows.append((prompt + response + [EOS_ID], len(prompt)))
        longest = max(len(ids) for ids, _ in rows)
        input_ids = torch.tensor([ids + [PAD_ID] * (longest - len(ids)) for ids, _ in rows])
        # Only the response is learned: -100 is cross_entropy's ignore_index. Pads on the right need
        # no attention mask, since a causal model never looks at them from a real token.
        labels = [[-100] * n + ids[n:] + [-100] * (longest - len(ids)) for ids, n in rows]
        labels = torch.tensor(labels)
        logits = model(input_ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


def save(out, model, tokenizer, train, test):
    out.mkdir(parents=True, exist_ok=True)
    # A trap: whoever samples with these settings does not sample from the model, and a test fails.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=5,
        top_p=0.5,
        repetition_penalty=1.3,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name, problems in ("train", train), ("test", test):
        rows = [{"question": question_of(terms), "answer": str(sum(terms))} for terms in problems]
        lines = [json.dumps(row) for row in rows]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


# --- how good is it? ---


@torch.no_grad()
def accuracy(folder, samples=4):
    """Sampled at temperature 1 on the test problems: share right, mean and longest response."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    questions = [problem["question"] for problem in problems]
    inputs = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        **inputs,
        max_new_tokens=48,
        num_return_sequences=samples,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    right = 0
    for row, text in enumerate(tokenizer.batch_decode(responses, skip_special_tokens=True)):
        right += re.findall(r"\\boxed\{(\d+)\}", text)[-1:] == [problems[row // samples]["answer"]]
    lengths = (responses != PAD_ID).sum(1).float()
    return right / len(responses), lengths.mean().item(), int(lengths.max())


def main():
    parser = argparse.ArgumentParser(description="Make the tiny pretrained model and its problems.")
    parser.add_argument("--weak", action="store_true", help="a base that is right one time in ten")
    parser.add_argument("--rambling", action="store_true", help="a base that likes long responses")
    parser.add_argument("--exact", type=float, help="share of exact demonstrations; the rest guess")
    parser.add_argument("--skilled", action="store_true", help="learn to add first, then the mix")
    parser.add_argument("--guess_up_to", type=int, help="highest guess (default: 9 per term)")
    parser.add_argument("--out", type=Path, help="folder to write (default: tests/tiny[-...])")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and pretraining")
    parser.add_argument("--steps", type=int, default=STEPS, help="pretraining steps")
    args = parser.parse_args()
    name = "tiny"
    mix = MIX
    if args.weak:
        name = "tiny-weak"
        mix = WEAK
    if args.rambling:
        name = "tiny-rambling"
        mix = RAMBLING
    if args.exact is not None:
        name = f"tiny-{args.exact:g}"
        mix = {"exact": args.exact, "guess": 1 - args.exact}
    if args.skilled:
        name += "-skilled"
    out = args.out or TESTS / name

    start = time.time()
    torch.set_num_threads(1)  # sums in another order would be another model
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train, test = make_problems(rng)
    tokenizer = make_tokenizer()
    model = make_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {len(train)} + {len(test)} problems")
    held_out = {question_of(terms) for terms in test}
    steps = args.steps
    if args.skilled:
        pretrain(model, tokenizer, held_out, {"exact": 1.0}, None, steps, rng)
        steps = AFTER_SKILL
    pretrain(model, tokenizer, held_out, mix, args.guess_up_to, steps, rng)
    save(out, model, tokenizer, train, test)

    questions = [question_of(terms) for terms in train + test]
    answers = [step_by_step(terms) for terms in train + test]
    check_tokenizer(AutoTokenizer.from_pretrained(out), questions + answers)
    share, mean, longest = accuracy(out)
    lengths = f"{mean:.1f} tokens per response, {longest} at most"
    print(f"accuracy of the base at T = 1: {share:.3f}, {lengths}")
    print(f"wrote {out} in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
