"""Tool calls in the answers of each family, cut into pieces at every place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from vocabularies import byte_level, wrapped

from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tool_format import Part, ToolFormat, ToolParser
from weft.server.tools.tool_hermes import HermesFormat
from weft.server.tools.tool_json import CallReader
from weft.server.tools.tool_llama3 import Llama3Format
from weft.server.tools.tool_mistral import MistralFormat
from weft.server.tools.tool_parsers import detect, tool_format

HERMES, LLAMA, MISTRAL = HermesFormat(), Llama3Format(), MistralFormat(has_args=False)
NAMES = frozenset({"add", "say"})
Read = tuple[str, list[tuple[str, str]]]


def read(form: ToolFormat, pieces: list[str]) -> Read:
    """All text, and (name, arguments) of each call; checks what a client relies on."""
    parser: ToolParser = form.parser(NAMES)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.flush()
    calls: list[list[str]] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif part.id is not None:
            assert part.name
            assert part.index == len(calls), "calls are numbered in order"
            calls.append([part.name, part.arguments])
        else:
            assert part.index == len(calls) - 1, "only the last call goes on"
            calls[-1][1] += part.arguments
    return text, [(name, arguments) for name, arguments in calls]


A, S = '{"a": 1, "b": [2, {"c": "}]\\""}]}', '{"text": "é ] } </tool_call>"}'
CASES: list[tuple[ToolFormat, str, Read]] = [
    (HERMES, "just text", ("just text", [])),
    (HERMES, "a <tool_cal of text", ("a <tool_cal of text", [])),
    (HERMES, f'Hm.<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>', ("Hm.", [("add", A)])),
    (
        HERMES,
        f'<tool_call>{{"name":"add","arguments":{A}}}</tool_call>\n'
        f'<tool_call>\n{{"arguments": {S}, "name": "say"}}\n</tool_call>\n',
        ("", [("add", A), ("say", S)]),
    ),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),
    (HERMES, "<tool_call>no object</tool_call>", ("<tool_call>no object</tool_call>", [])),
    (HERMES, '<tool_call>{"nam', ('<tool_call>{"nam', [])),
    (HERMES, '<tool_call>{"name": 5}</tool_call>x', ('<tool_call>{"name": 5}</tool_call>x', [])),
    (LLAMA, f'{{"name": "add", "parameters": {A}}}', ("", [("add", A)])),
    (LLAMA, f'<|python_tag|>{{"name": "add", "parameters": {A}}}', ("", [("add", A)])),
    (
        LLAMA,
        f'\n{{"type": "function", "name": "add", "parameters": {A}}}; {{"name": "say", "parameters": {S}}}\n',
        ("", [("add", A), ("say", S)]),
    ),
    (LLAMA, '{"name": "Alice", "age": 7}', ('{"name": "Alice", "age": 7}', [])),
    (LLAMA, '{"age": 7} and more', ('{"age": 7} and more', [])),
    (LLAMA, '{"age"', ('{"age"', [])),
    (
        LLAMA,
        f'Text first {{"name": "add", "parameters": {A}}}',
        (f'Text first {{"name": "add", "parameters": {A}}}', []),
    ),
    (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (LLAMA, " <|python", (" <|python", [])),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}]', ("", [("add", A)])),
    (
        MISTRAL,
        f'ok[TOOL_CALLS][{{"name": "add", "arguments": {A}}}, {{"arguments": {S}, "name": "say"}}]',
        ("ok", [("add", A), ("say", S)]),
    ),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]say[CALL_ID]123456789[ARGS]{S}", ("", [("add", A), ("say", S)])),
    (MISTRAL, "[TOOL_CALLS] nothing", ("[TOOL_CALLS]nothing", [])),
    (MISTRAL, "a list [1, 2] [TOOL", ("a list [1, 2] [TOOL", [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=[text for _, text, _ in CASES])
def test_calls_are_read_whole_and_character_by_character(form: ToolFormat, text: str, expected: Read) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


@given(st.sampled_from(CASES), st.data())
@settings(deadline=None)
def test_pieces_make_no_difference(case: tuple[ToolFormat, str, Read], data: st.DataObject) -> None:
    form, text, expected = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == expected


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL]), st.text(alphabet='<tool_cal>[TOOL_CALLS]{"name": ,}/\n;|', max_size=60)
)
@settings(deadline=None)
def test_no_text_breaks_a_parser(form: ToolFormat, text: str) -> None:
    assert read(form, [text]) == read(form, list(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON), st.booleans(), st.booleans(), st.integers(1, 9))
@settings(deadline=None)
def test_arguments_are_handed_out_as_written(arguments: dict[str, Any], ascii: bool, first: bool, size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    pairs = ['"name": "f"', f'"arguments": {written}', '"more": [1.5e3 , null]']
    text = "{ " + ", ".join(pairs if first else pairs[::-1]) + " } tail"
    reader, got, at = CallReader(), "", 0
    while not reader.done:
        assert not reader.failed
        piece = text[at : at + size]
        at += reader.feed(piece)
        got += reader.take_arguments()
    assert (reader.name, got, text[at:]) == ("f", written, " tail")


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HERMES.parser(NAMES)
    parser.feed('<tool_call>{"name": "add", "arguments": {"a')
    (part,) = parser.feed('": 12')
    assert not isinstance(part, str)
    assert part.arguments == '": 12'


TOOLS_LOOP = "{% for tool in tools %}{{ tool }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (TOOLS_LOOP + "<tool_call>", "hermes"),
        (TOOLS_LOOP + "[TOOL_CALLS]", "mistral"),
        (TOOLS_LOOP + '{"name": f, "parameters": {}}', "llama3_json"),
        (TOOLS_LOOP, "auto"),
        ("<tool_call>", "auto"),
        (None, "auto"),
    ],
)
def test_the_family_is_read_off_the_template(template: str | None, name: str) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=template))
    assert detect(tokenizer) == name
    form = tool_format("auto", tokenizer)
    if template is None or "tools" not in template:
        assert isinstance(form, HermesFormat), "the server tells the model how to write calls"
    else:
        assert (form is None) == (name == "auto")
    assert isinstance(tool_format("hermes", tokenizer), HermesFormat)


def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(wrapped(backend))
    ids = tokenizer.encode("[TOOL_CALLS]x<|eos|>")
    shown = tokenizer.detokenizer(show=frozenset({ids[0]}))
    assert "".join(map(shown.feed, ids)) + shown.flush() == "[TOOL_CALLS]x"
    hidden = tokenizer.detokenizer()
    assert "".join(map(hidden.feed, ids)) + hidden.flush() == "x"
