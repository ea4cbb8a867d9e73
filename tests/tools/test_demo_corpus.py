"""The demo model's corpus, tokenizer and shipped files."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.tools.demo import asking, evaluate, phrases, skills
from weft.tools.demo import tokenizer as demo_tokenizer
from weft.tools.demo.corpus import ANSWER, PROMPT, Corpus, prompt_ids
from weft.tools.demo.functions import offer, written
from weft.tools.demo.questions import Question, questions
from weft.tools.demo.skills import MAX_CONTEXT_TOKENS, SKILLS, draw, held_out, is_held_out
from weft.tools.demo.wording import ask_for, is_new, spin
from weft.tools.demo.words import NAMES, WORDS

TOKENIZER_FILE = str(MODEL_PATH / "tokenizer.json")
TOKENIZER = Tokenizer.from_file(TOKENIZER_FILE)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


# --- questions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_gives_the_same_examples_for_the_same_arguments(skill: str) -> None:
    first = held_out(skill, 6, seed=3)
    assert first == held_out(skill, 6, seed=3)
    assert first[:3] == held_out(skill, 3, seed=3)
    assert first != held_out(skill, 6, seed=4)


@pytest.mark.parametrize("skill", SKILLS)
def test_training_never_draws_a_held_out_key(skill: str) -> None:
    rng = Random(0)
    assert not any(is_held_out(draw(skill, rng).key) for _ in range(300))
    assert all(is_held_out(example.key) for example in held_out(skill, 30))


@pytest.mark.parametrize("skill", SKILLS)
def test_an_example_ends_with_a_question_of_the_user(skill: str) -> None:
    for example in held_out(skill, 20, seed=1):
        assert example.skill == skill
        assert example.answer
        assert bool(example.messages) != bool(example.prompt)
        if example.messages:
            assert example.messages[-1]["role"] in (("user", "tool") if skill == "tools" else ("user",))
        assert example.ends or skill in ("story", "complete")


def test_sums_are_right() -> None:
    for example in held_out("add", 50):
        assert int(example.answer) == sum(map(int, example.key.split()[1:]))
    for example in held_out("subtract", 50):
        low, high = map(int, example.key.split()[1:])
        assert abs(int(example.answer)) == high - low


def test_lists_are_answered_right() -> None:
    solvers: dict[str, Callable[[list[str]], list[str]]] = {
        "copy": list,
        "reverse": lambda words: words[::-1],
        "sort": sorted,
        "upper": lambda words: [word.upper() for word in words],
    }
    for skill, solve in solvers.items():
        for example in held_out(skill, 50):
            assert re.split(r", |,|\s", example.answer) == solve(example.key.split(" "))
    assert all(int(example.answer) == len(example.key.split(" ")) for example in held_out("count", 50))


@pytest.mark.parametrize(("context_tokens", "count"), [(48, 60), (200, 60), (1500, 10), (MAX_CONTEXT_TOKENS, 20)])
def test_recall_fills_the_context_asked_for(context_tokens: int, count: int) -> None:
    for example in held_out("recall", count, seed=5, context_tokens=context_tokens):
        assert context_tokens - 80 <= len(prompt_ids(TOKENIZER, example)) <= context_tokens
        assert example.answer in example.messages[0]["content"]


def test_unknown_skills_and_impossible_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown skill 'dance'"):
        held_out("dance", 1)
    with pytest.raises(ValueError, match="must be 48 to 1800"):
        held_out("recall", 1, context_tokens=5000)
    with pytest.raises(ValueError, match="is for the skill 'recall'"):
        held_out("add", 1, context_tokens=100)


# --- questions in the wording of people ------------------------------------------------------------------------------


def test_there_are_two_hundred_questions_and_thirty_on_functions() -> None:
    groups = Counter(question.group for question in questions())
    assert groups.pop("tools") == 30
    assert sum(groups.values()) == 200
    assert len(groups) == 13


@pytest.mark.parametrize(
    ("check", "answer", "right", "wrong"),
    [
        ("number", "12", "12", "121"),
        ("number", "12", "It is 12.", "12 13"),
        ("list", "1 2 3", "1, 2, 3", "1 3 2"),
        ("text", "Hello, World!", "hello, world", "hello world"),
        ("exact", "DOG, CAT", "DOG, CAT", "DOG CAT"),
        ("contains", ["do not know", "cannot"], "I do not know.", "It is Paris."),
        (
            "call",
            {"name": "add", "arguments": {"a": 1}},
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        ),
    ],
)
def test_answers_are_compared(check: str, answer: Any, right: str, wrong: str) -> None:
    question = Question("any", check, answer, [])
    assert question.is_right(right)
    assert not question.is_right(wrong)


def test_training_uses_no_held_out_wording() -> None:
    """Checks the words around the subject, and that no question is used verbatim."""
    sentences = {question.messages[-1]["content"].lower() for question in questions() if question.group != "tools"}
    requested = 0
    rng = Random(5)
    for skill in ("sums", "multiply", "then", "compare", "count_down", "lists", "letters", "repeat", "told", "unknown"):
        for _ in range(400):
            for message in draw(skill, rng).messages:
                if message["role"] == "user":
                    assert message["content"].lower() not in sentences
                    requested += 1
    assert requested > 4000
    for pattern in (*asking.REPEAT, *asking.SORT, *asking.SUM, *asking.FOLLOW["+"], *asking.COUNT_DOWN_TO_ONE):
        for _ in range(30):
            assert is_new(ask_for(rng, pattern))
    assert not is_new("Spell {} backwards")
    assert not is_new("+ {a}")


def test_no_row_uses_a_held_out_wording() -> None:
    """Checks it for any numbers, and where a pattern and its subject form the wording together."""
    corpus = Corpus(TOKENIZER_FILE, seed=3)
    requested = 0
    for index in range(4):
        for row in corpus.batch(index, rows=64, length=512)[0]:
            text = TOKENIZER.decode(list(row), skip_special_tokens=False)
            if "Tools:" in text:
                continue  # a question about a function is phrased like one about a sum
            for question in text.split("<|user|>")[1:-1]:
                assert is_new(re.sub(r"\d+", "_", question.split("<|end|>")[0])), question
                requested += 1
    assert requested > 2000


def test_a_pattern_generates_each_of_its_alternatives() -> None:
    rng = Random(0)
    assert {spin(rng, "[a|b [c|d]|] x") for _ in range(200)} == {"a x", "b c x", "b d x", " x"}
    requested = {ask_for(rng, "! add {a} and {b}", "", 3, 4) for _ in range(300)}
    assert len(requested) > 60
    assert all(re.search(r"add 3 and 4", text, re.IGNORECASE) for text in requested)
    copied = {ask_for(rng, "! repeat: {}", "One. Two", tight_end=True) for _ in range(300)}
    assert all(text.endswith(": One. Two") for text in copied), "nothing follows what is to be copied"


def test_sums_of_all_kinds_are_right() -> None:
    for example in held_out("then", 60, seed=4):
        assert 0 <= int(example.answer) <= 1998
    for example in held_out("multiply", 40, seed=4):
        numbers = re.findall(r"\d+", example.messages[0]["content"])
        if len(numbers) == 2 and "box" not in example.key:
            product = int(numbers[0]) * int(numbers[1])
            assert example.answer in (str(product), phrases.TIMES_TOO_LARGE)


def test_letters_and_copies_are_right() -> None:
    for example in held_out("letters", 80, seed=4):
        kind, text = example.key.split(" ", 1)
        solved = {"backwards": text[::-1], "spell": " ".join(text), "length": str(len(text)), "first": text[0]}
        assert example.answer == solved.get(kind, text[-1])
    for example in held_out("repeat", 80, seed=4):
        assert example.answer in example.messages[0]["content"]


def test_calls_take_their_arguments_from_the_question() -> None:
    calls = 0
    for example in held_out("tools", 120, seed=4):
        assert 1 <= len(example.tools) <= 4
        if example.answer.startswith("<tool_call>") and example.answer.count("<tool_call>") == 1:
            call = json.loads(example.answer.splitlines()[1])
            (function,) = [tool["function"] for tool in example.tools if tool["function"]["name"] == call["name"]]
            assert list(call["arguments"]) == function["parameters"]["required"]
            requested = example.messages[-1]["content"].lower()
            assert all(str(value).lower() in requested for value in call["arguments"].values())
            calls += 1
    assert calls > 30


# --- training rows -------------------------------------------------------------------------------------------------


def test_a_batch_depends_only_on_seed_and_index() -> None:
    ids, kinds = Corpus(TOKENIZER_FILE, seed=1).batch(7, rows=4, length=256)
    again, kinds_again = Corpus(TOKENIZER_FILE, seed=1).batch(7, rows=4, length=256)
    other, _ = Corpus(TOKENIZER_FILE, seed=2).batch(7, rows=4, length=256)
    assert (ids == again).all()
    assert (kinds == kinds_again).all()
    assert (ids != other).any()


@pytest.mark.parametrize("length", [256, 2048])
def test_rows_begin_a_conversation_and_are_full(length: int) -> None:
    ids, kinds = Corpus(TOKENIZER_FILE, seed=0).batch(0, rows=8, length=length)
    assert (ids[:, 0] == demo_tokenizer.BEGIN_ID).all()
    assert (ids != demo_tokenizer.PAD_ID).all()
    assert (kinds == ANSWER).any(axis=1).all()
    markers = [demo_tokenizer.BEGIN_ID, demo_tokenizer.USER_ID, demo_tokenizer.ASSISTANT_ID, demo_tokenizer.SYSTEM_ID]
    for marker in markers:
        assert (kinds[ids == marker] < PROMPT).all()


def test_no_row_contains_a_held_out_sum() -> None:
    corpus = Corpus(TOKENIZER_FILE, seed=0)
    requested = 0
    for index in range(8):
        for row in corpus.batch(index, rows=64, length=256)[0]:
            for text in TOKENIZER.decode(list(row), skip_special_tokens=False).split("<|user|>"):
                question, answer, *_ = [*text.split("<|end|>"), ""]
                if not re.fullmatch(r"<\|assistant\|>-?\d+", answer):
                    continue  # to be copied, or for a function
                if match := re.fullmatch(r"[^\d:]*?(\d{1,3}) ?([-+]) ?(\d{1,3})[^\d+*/-]*", question):
                    a, b = sorted((int(match[1]), int(match[3])))
                    requested += 1
                    assert max(a, b) < 20 or not is_held_out(f"{'add' if match[2] == '+' else 'subtract'} {a} {b}")
    assert requested > 100


# --- tokenizer -----------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    if not any(token in text for token in demo_tokenizer.SPECIAL_TOKENS):
        assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["héllo 🌍", "日本語のテキスト", "\u0000\ud7ff\uffff", "a\u0301 👩‍👩‍👧", " \n\t  x"])
def test_hard_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_the_vocabulary_is_small_and_knows_the_words() -> None:
    assert TOKENIZER.get_vocab_size() == demo_tokenizer.VOCAB_SIZE == 2048
    assert all(len(encode(form)) == 1 for word in WORDS + NAMES for form in (word, " " + word))
    assert len(encode("4821")) == 4
    assert len(encode("🌍")) == 4, "characters outside ASCII are split over tokens"


@pytest.mark.slow
def test_the_shipped_tokenizer_is_the_one_built_from_the_corpus(tmp_path: Path) -> None:
    demo_tokenizer.write_tokenizer(tmp_path, max_tokens=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (MODEL_PATH / name).read_text()


def test_the_chat_template_matches_training() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    for skill in ("recall", "memory", "echo", "then", "told", "tools"):
        for example in held_out(skill, 20, context_tokens=200 if skill == "recall" else None):
            ids = tokenizer.apply_chat_template(
                example.messages, tools=example.tools or None, add_generation_prompt=True, return_dict=False
            )
            assert ids == prompt_ids(TOKENIZER, example)
    plain = held_out("complete", 1)[0]
    assert tokenizer(plain.prompt).input_ids == prompt_ids(TOKENIZER, plain)
    with pytest.raises(Exception, match="system, user, assistant and tool"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}])


def test_the_chat_template_lists_functions_one_per_line() -> None:
    from transformers import AutoTokenizer

    schema: dict[str, Any] = {
        "type": "object",
        "title": "Arguments",
        "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "c": {}},
        "required": ["a", "b"],
    }
    function = {"name": "f", "description": "  Does it.\n\nArgs:\n  a: one", "parameters": schema}
    bare = {"type": "function", "function": {"name": "g"}}
    everything = {
        "type": "function",
        "function": {"name": "h", "parameters": {"properties": {"x": {"type": "string"}}}},
    }
    tools = [{"type": "function", "function": function}, bare, everything]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    reported = "Tools:\nf(a: integer, b: any): Does it.\ng(): \nh(x: string): "
    assert text == f"<|begin|><|system|>Be brief.\n\n{reported}<|end|><|user|>Hi<|end|>"
    assert offer(tools) == reported
    without = tokenizer.apply_chat_template(messages[1:], tools=tools, tokenize=False)
    assert without == f"<|begin|><|system|>{reported}<|end|><|user|>Hi<|end|>"
    developer = [{"role": "developer", "content": "Be brief."}]
    assert tokenizer.apply_chat_template(developer, tokenize=False) == "<|begin|><|system|>Be brief.<|end|>"


def test_the_chat_template_writes_calls_like_the_model() -> None:
    from transformers import AutoTokenizer

    call = {"name": "add", "arguments": {"a": 1, "b": "zwölf"}}
    calls = [{"type": "function", "function": call}] * 2
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "13"}]
    text = AutoTokenizer.from_pretrained(MODEL_PATH).apply_chat_template(messages, tokenize=False)
    assert text == f"<|begin|><|assistant|>{written(call)}\n{written(call)}<|end|><|tool|>13<|end|>"


# --- the shipped model ---------------------------------------------------------------------------------------------


def test_the_shipped_files_are_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL_PATH.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= 14_000_000
    with safe_open(MODEL_PATH / "model.safetensors", "pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
        assert {piece.get_dtype() for piece in slices} == {"BF16"}
        shapes = [piece.get_shape() for piece in slices]
    assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) <= 6_000_000


def test_the_configuration_is_a_plain_llama() -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["head_dim"] in (64, 128)
    assert config["eos_token_id"] == demo_tokenizer.END_ID


def test_the_model_card_reports_every_skill_above_its_threshold() -> None:
    card = (MODEL_PATH / "README.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| \d+ \| ([\d.]+)% ", card, flags=re.MULTILINE))
    assert set(rows) == {task.name for task in evaluate.TASKS}
    assert all(float(rows[task.name]) >= 100 * task.threshold for task in evaluate.TASKS)


@pytest.mark.slow
def test_the_shipped_model_answers_held_out_questions() -> None:
    answerer = evaluate.Answerer(MODEL_PATH, "cpu", "float32")
    short = ("add", "subtract", "copy", "reverse", "upper", "sort", "count", "chat", "memory")
    examples = [held_out(skill, 1, seed=11)[0] for skill in short]
    examples += held_out("recall", 1, seed=11, context_tokens=600)
    assert answerer.right(examples, batch_size=len(examples)) >= len(examples) - 1


# --- the commands --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_writes_a_loadable_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    from weft.tools.demo.network import Shape
    from weft.tools.demo.train import Plan, train

    plan = Plan(steps=2, batch_tokens=512, lr=1e-3, seed=0, device="cpu", workers=0, check_every=2)
    shape = Shape(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    train(plan, shape, tmp_path)
    assert "held out: recall" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_commands_report_bad_arguments_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.tools.demo import train

    with pytest.raises(SystemExit):
        evaluate.main(["--model", str(tmp_path)])
    assert "config.json is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path), "--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err
    assert train.main(["--out", str(tmp_path), "--device", "abacus"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_story_is_longer_than_the_context() -> None:
    assert len(encode(skills.story_text())) > 2048
