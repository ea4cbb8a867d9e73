"""Answers of each family, cut into pieces at every position, give the same text, thinking and calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transcripts import ALL, MARKS, TOOLS, Transcript
from vocabularies import byte_level, wrapped

from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.families import HERMES, REASONING_FORMATS, TOOL_FORMATS
from weft.server.tools.stream import Part, StreamParser, Thought
from weft.server.tools.tool_json import CallReader
from weft.server.tools.tool_parsers import answer_parser, detect, reasoning_format, tool_format

Read = tuple[str, tuple[tuple[str, str], ...], str]


def parser_of(case: Transcript) -> StreamParser:
    form = TOOL_FORMATS[case.tools] if case.tools else None  # type: ignore[index]
    reasoning = REASONING_FORMATS[case.thinks] if case.thinks else None  # type: ignore[index]
    return answer_parser(form, reasoning, TOOLS, inside=case.inside)


def read(case: Transcript, pieces: list[str], *, short: bool = False) -> Read:
    """All text, (name, arguments) of each call, all thinking. Checks the guarantees for clients. `short`: text that
    passes is not fed."""
    parser, parts = parser_of(case), list[Part]()
    for piece in pieces:
        parts += list(filter(None, [piece])) if short and parser.passes(piece) else parser.feed(piece)
    parts += parser.flush(cut=case.cut)
    calls: list[list[str]] = []
    text = thinking = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif isinstance(part, Thought):
            thinking += part.text
        elif part.id is not None:
            assert part.name
            assert part.index == len(calls), "calls are numbered in order"
            calls.append([part.name, part.arguments])
        else:
            assert part.index == len(calls) - 1, "only the last call goes on"
            calls[-1][1] += part.arguments
    for piece in (text, thinking, *(one for call in calls for one in call)):
        piece.encode()
    return text, tuple((name, arguments) for name, arguments in calls), thinking


def cut(text: str, rng: random.Random, most: int = 6) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(1, most)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def random_answer(rng: random.Random) -> Transcript:
    """Marks of all families in any order, or a damaged transcript."""
    case = rng.choice(ALL)
    if rng.random() < 0.5:
        return case._replace(text="".join(rng.choices(MARKS, k=rng.randint(1, 16))))
    text = case.text
    for _ in range(rng.randint(0, 3)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(("", rng.choice(MARKS))) + text[at + rng.randint(0, 4) :]
    return case._replace(text=text)


@pytest.mark.parametrize("case", ALL, ids=[f"{case.tools or case.thinks}-{case.text}"[:80] for case in ALL])
def test_every_split_gives_the_result_of_the_whole(case: Transcript) -> None:
    expected = (case.content, case.calls, case.reasoning)
    assert read(case, [case.text]) == expected
    assert read(case, list(case.text)) == expected
    assert read(case, list(case.text), short=True) == expected
    for at in range(1, len(case.text)):
        assert read(case, [case.text[:at], case.text[at:]]) == expected


def test_no_answer_breaks_a_parser_and_no_split_changes_it() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        case = random_answer(rng)
        whole = read(case, [case.text])
        assert read(case, cut(case.text, rng)) == whole, case
        assert read(case, list(case.text)) == whole, case
        assert read(case, cut(case.text, rng), short=True) == whole, case


def test_text_without_marks_need_not_be_parsed() -> None:
    parser = parser_of(next(case for case in ALL if case.tools == "hermes"))
    assert parser.passes("Hello")
    assert parser.passes(" world, 1 > 0.")
    assert parser.passes("")
    for held in ("and ", "\n", "<", "a < b"):
        assert not parser.passes(held)
    parser.feed("and ")
    assert not parser.passes("so")  # after white space that was held back
    assert parser.feed("so") == [" so"]
    assert parser.passes(" on")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_million_splits_change_nothing(seed: int) -> None:
    """100,000 splits a seed: 10,000 random answers, each split in ten ways."""
    rng = random.Random(100 + seed)
    for _ in range(10_000):
        case = random_answer(rng)
        whole = read(case, [case.text])
        for most in (1, 1, 2, 2, 4, 4, 8, 8, 16):
            assert read(case, cut(case.text, rng, most), short=most % 2 == 0) == whole, case
        assert read(case, list(case.text)) == whole, case


PLAIN = st.text(alphabet="ab <>|[]{}()_/=:,;.\"'\\\n\té😀｜▁`0", max_size=60)


@given(st.sampled_from(ALL), PLAIN, st.data())
@settings(deadline=None, max_examples=200)
def test_text_without_marks_is_unchanged(case: Transcript, text: str, data: st.DataObject) -> None:
    case = case._replace(text=text, inside=False)
    if any(mark[:4] in text for mark in MARKS if len(mark) > 3):
        return
    at = data.draw(st.integers(0, len(text)))
    content, calls, thinking = read(case, [text[:at], text[at:]])
    if case.thinks != "openai_gptoss":
        assert (content, calls, thinking) == (text, (), "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON), st.booleans(), st.booleans(), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_arguments_are_sent_as_written(arguments: dict[str, Any], ascii: bool, first: bool, size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    pairs = ['"name": "f"', f'"arguments": {written}', '"more": [1.5e3 , null]']
    text = "{ " + ", ".join(pairs if first else [pairs[1], pairs[0], pairs[2]]) + " } tail"
    reader, got, at = CallReader(), "", 0
    while not reader.done:
        assert not reader.failed
        piece = text[at : at + size]
        at += reader.feed(piece)
        got += reader.take_arguments()
    assert (reader.name, got, text[at:]) == ("f", written, " tail")


def test_white_space_that_waits_for_text_is_kept_piece_by_piece() -> None:
    parser = answer_parser(HERMES, None, TOOLS)
    assert [parser.feed(" \n") for _ in range(3)] == [[], [], []]
    assert parser.feed("\ta ") == [" \n \n \n\ta"]
    assert [*parser.feed("\n"), *parser.feed("b"), *parser.feed(" "), *parser.flush()] == [" \nb", " "]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = answer_parser(HERMES, None, TOOLS)
    parser.feed('<tool_call>{"name": "add", "arguments": {"a')
    (part,) = parser.feed('": 12')
    assert not isinstance(part, str | Thought)
    assert part.arguments == '": 12'


def test_texts_between_tags_stream_as_json() -> None:
    parser = answer_parser(TOOL_FORMATS["qwen3_coder"], None, TOOLS)
    parser.feed("<tool_call>\n<function=say>\n<parameter=text>\nHe said ")
    (part,) = parser.feed('"yes"')
    assert not isinstance(part, str | Thought)
    assert part.arguments == '\\"yes\\"'


def test_kimis_calls_keep_the_ids_that_its_template_expects() -> None:
    case = next(case for case in ALL if case.tools == "kimi_k2" and len(case.calls) == 2)
    parts = parser_of(case).feed(case.text)
    ids = [part.id for part in parts if not isinstance(part, str | Thought) and part.id is not None]
    assert ids == ["functions.get_weather:0", "functions.say:1"]


TOOLS_LOOP = "{% for tool in tools %}{{ tool }}{% endfor %}"


TEMPLATES = [
    (TOOLS_LOOP + "<tool_call>", "hermes", None),
    (TOOLS_LOOP + "<tool_call>{% if enable_thinking %}<think></think>", "hermes", "qwen3"),
    (TOOLS_LOOP + "[TOOL_CALLS]", "mistral", None),
    (TOOLS_LOOP + "[TOOL_CALLS][THINK]", "mistral", "mistral"),
    (TOOLS_LOOP + '{"name": f, "parameters": {}}', "llama3_json", None),
    (TOOLS_LOOP + "<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder", None),
    (TOOLS_LOOP + "<tool_call>f\n<arg_key>a</arg_key><think></think>", "glm45", "qwen3"),
    (TOOLS_LOOP + "<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
    (
        TOOLS_LOOP + "<｜Assistant｜><｜tool▁call▁begin｜>{{ t.type + '<｜tool▁sep｜>' + t.name + '\n```json' }}",
        "deepseek_v3",
        "deepseek_v3",
    ),
    (
        TOOLS_LOOP + "<｜Assistant｜><｜tool▁call▁begin｜>{{ t.name + '<｜tool▁sep｜>' + t.a }}",
        "deepseek_v31",
        "deepseek_v3",
    ),
    (TOOLS_LOOP + '<｜DSML｜invoke name="f">', "deepseek_v32", None),
    (TOOLS_LOOP + "<minimax:tool_call>", "minimax_m2", None),
    (TOOLS_LOOP + "<|start|>assistant<|channel|>commentary to=functions.f", "openai", "openai_gptoss"),
    (TOOLS_LOOP + "<|tool_call|>", "granite", None),
    (TOOLS_LOOP + "<|tool|><|/tool|><|tool_call|><|/tool_call|>", "phi4_mini_json", None),
    (TOOLS_LOOP + "<start_function_call>call:", "functiongemma", None),
    (TOOLS_LOOP + "<|tool_call>call:<|channel>thought", "gemma4", "gemma4"),
    (TOOLS_LOOP + "```tool_code", "gemma", None),
    (TOOLS_LOOP + "<|python_start|>[f()]<|python_end|>", "llama4_pythonic", None),
    (TOOLS_LOOP + "[func_name1(a=1)]", "pythonic", None),
    (TOOLS_LOOP + '<TOOLCALL>[{"name": "f", "parameters": {}}]</TOOLCALL>', "auto", None),
    (TOOLS_LOOP + '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>', "auto", None),
    (TOOLS_LOOP + "<seed:tool_call>\n<function=f>\n<parameter=a>", "auto", None),
    (TOOLS_LOOP, "auto", None),
    ("<tool_call>", "auto", None),
    (None, "auto", None),
]


@pytest.mark.parametrize(("template", "name", "thinks"), TEMPLATES)
def test_the_family_is_detected_from_the_template(template: str | None, name: str, thinks: str | None) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=template))
    assert detect(tokenizer) == name
    expected = REASONING_FORMATS[thinks] if thinks else None  # type: ignore[index]
    assert reasoning_format("auto", tokenizer) == expected
    assert reasoning_format("none", tokenizer) is None
    form = tool_format("auto", tokenizer)
    if template is None or "tools" not in template:
        assert form is HERMES, "the server tells the model how to write calls"
    else:
        assert (form is None) == (name == "auto")
    assert tool_format("hermes", tokenizer) is HERMES


def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(wrapped(backend))
    ids = tokenizer.encode("[TOOL_CALLS]x<|eos|>")
    shown = tokenizer.detokenizer(show=frozenset({ids[0]}))
    assert "".join(map(shown.feed, ids)) + shown.flush() == "[TOOL_CALLS]x"
    hidden = tokenizer.detokenizer()
    assert "".join(map(hidden.feed, ids)) + hidden.flush() == "x"
