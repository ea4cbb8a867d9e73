"""Grammars of calls, for each format: the model's calls pass, schema violations do not, and all that passes parses as a
call that follows the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transcripts import TOOLS
from vocabularies import byte_level, wrapped

from weft.engine.wire import grammar_text
from weft.engine.wire.grammar_text import LIMITS
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.families import REASONING_FORMATS, TOOL_FORMATS
from weft.server.tools.reasoning import ReasoningFormat
from weft.server.tools.stream import Call, Thought
from weft.server.tools.tool_format import Tools
from weft.server.tools.tool_parsers import answer_parser
from weft.server.tools.tools import Function, Tool, call_of, marker_of

SMALL: dict[str, dict[str, Any]] = {
    "pick": {
        "type": "object",
        "properties": {
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "deep": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "all": {"type": "array", "items": {"enum": ["a b", "c"]}, "maxItems": 2},
            "at": {"$ref": "#/$defs/at"},
        },
        "required": ["size", "unit"],
        "additionalProperties": False,
        "$defs": {"at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                         "additionalProperties": False}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
"""with values that end by themselves"""

_ALL = {mark for form in TOOL_FORMATS.values() for mark in form.markers}
MARKS = sorted(mark for mark in _ALL if mark[0] in "<[" and mark[-1] in ">]")
GIVEN = [(name, special) for name in TOOL_FORMATS for special in (False, True)]


@cache
def vocabulary(special: bool) -> tuple[Tokenizer, LLTokenizer]:
    backend = byte_level()
    if special:
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in [*MARKS, "<think>", "</think>"]])
    return Tokenizer(wrapped(backend)), LLTokenizer(backend.to_str())


def grammar(name: str, special: bool, tools: Tools, **how: Any) -> str:
    offered = [Tool(function=Function(name=tool, parameters=schema)) for tool, schema in tools.items()]
    how = {"parallel": True, **how}
    _, write = call_of(offered, TOOL_FORMATS[name], vocabulary(special)[0], **how)  # type: ignore[index]
    return write()


def matcher(text: str, special: bool) -> LLMatcher:
    matcher = LLMatcher(vocabulary(special)[1], text, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str, text: str, special: bool) -> bool:
    ids = vocabulary(special)[0].encode(text, add_special_tokens=False)
    following = matcher(grammar, special)
    return following.try_consume_tokens(ids) == len(ids) and following.is_accepting()


def walk(grammar: str, special: bool, rng: random.Random) -> str | None:
    """A random answer that the grammar allows; None if it does not end."""
    tokenizer, tokens = vocabulary(special)
    following, mask, ids = matcher(grammar, special), np.zeros(-(-tokens.vocab_size // 32), np.int32), []
    for _ in range(600):
        if following.is_stopped() or (following.is_accepting() and rng.random() < 0.3):
            return tokenizer._decode(ids)
        following.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != tokens.eos_token]
        if not len(allowed):
            return tokenizer._decode(ids)
        spaces = [i for i in allowed if tokenizer.token_bytes(int(i)).isspace()]
        token = int(rng.choice(allowed if rng.random() < 0.1 else [i for i in allowed if i not in spaces] or allowed))
        assert following.consume_token(token)
        ids.append(token)
    return None


def calls_in(name: str, answer: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls, read as one piece per character."""
    parser = answer_parser(TOOL_FORMATS[name], None, tools)  # type: ignore[index]
    parts = [part for char in answer for part in parser.feed(char)] + parser.flush()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, Call) and part.id is not None:
            calls.append([part.name or "", part.arguments])
        elif isinstance(part, Call):
            calls[-1][1] += part.arguments
    return "".join(part for part in parts if isinstance(part, str)), [(a, b) for a, b in calls]


@pytest.mark.parametrize(("name", "special"), GIVEN)
def test_text_accepted_by_the_grammar_is_a_call_that_follows_its_schema(name: str, special: bool) -> None:
    rng, text, ended = random.Random(name), grammar(name, special, SMALL), 0
    for _ in range(3):
        answer = walk(text, special, rng)
        if answer is None:
            continue
        ended += 1
        content, calls = calls_in(name, answer, SMALL)
        assert (content, bool(calls)) == ("", True), answer
        for called, arguments in calls:
            validate(json.loads(arguments), SMALL[called])
    assert ended


@pytest.mark.parametrize(("name", "special"), GIVEN)
def test_the_models_calls_pass_and_schema_violations_do_not(name: str, special: bool) -> None:
    form = TOOL_FORMATS[name]  # type: ignore[index]
    required, free = grammar(name, special, TOOLS), grammar(name, special, TOOLS, free=True)

    def written(tool: str, arguments: str) -> str:
        return form.write(tool, arguments).removesuffix("<|call|>")

    good = written("get_weather", '{"city":"x","days":3,"metric":true}').replace("metric=true", "metric=True")
    wrong = ("get_weather", '{"days":3}'), ("get_weather", '{"city":"x","days":"three"}'), ("f", "{}")
    bad = [written(*one) for one in wrong]
    assert accepts(required, good, special)
    assert accepts(free, good, special)
    assert not any(accepts(required, one, special) for one in bad)
    assert not any(accepts(free, one, special) for one in bad)
    assert not accepts(required, "Some text.", special)
    if name == "openai":
        assert accepts(free, "<|channel|>final<|message|>Some text.", special)
        return
    assert accepts(free, "Some <b>text</b>.", special)
    if form.markup is not None and "pythonic" not in name:
        assert accepts(free, f"Let me see. {good}", special)
        assert not any(accepts(free, f"Let me see. {one}", special) for one in bad)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thinks", REASONING_FORMATS)
def test_the_grammar_of_an_answer_starts_after_its_thinking(thinks: str, special: bool) -> None:
    form: ReasoningFormat = REASONING_FORMATS[thinks]  # type: ignore[index]
    marker = marker_of(vocabulary(special)[0])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requested = form.final(grammar_text.json_schema(schema), marker)
    nested = grammar_text.either([requested, requested])
    for begun in (False, True):
        inside = begun and not form.channels
        text = form.before(nested, marker, inside=inside)
        first, thought = "", f"{'' if inside else form.begin}{{ Hm{form.end}\n"
        if form.channels:
            first, thought = "<|channel|>final<|message|>", f"{form.begin}{{ Hm<|end|><|start|>assistant"
        assert accepts(text, f'{thought}{first}{{"a": 1}}', special)
        assert not accepts(text, f'{thought}{first}{{"b": 1}}', special)
        assert not accepts(text, f"{thought}{first}text", special)
        assert accepts(text, f'{first}{{"a": 1}}', special) != inside
        parser = answer_parser(None, form, {}, inside=inside)
        parts = parser.feed(f'{thought}{first}{{"a": 1}}') + parser.flush()
        assert parts == [Thought("{ Hm"), '{"a": 1}']


REFERENCES: dict[str, dict[str, Any]] = {
    "pick": {
        "type": "object",
        "properties": {
            "zip": {"allOf": [{"$ref": "#/$defs/digits"}]},
            "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
            "size": {"$ref": "#/$defs/size"},
        },
        "required": ["zip", "unit", "size"],
        "additionalProperties": False,
        "$defs": {"digits": {"enum": ["12345", "true"]}, "unit": {"enum": ["1", "2"]}, "size": {"enum": [1, 2]}},
    }
}


@pytest.mark.parametrize(("name", "special"), GIVEN)
@pytest.mark.parametrize("root", ["properties", "$ref", "allOf"])
def test_types_behind_references_are_enforced_as_they_are_read(name: str, special: bool, root: str) -> None:
    pick = {key: value for key, value in REFERENCES["pick"].items() if key != "$defs"}
    definitions = {"$defs": {**REFERENCES["pick"]["$defs"], "pick": pick}}
    inner = {"properties": pick, "$ref": {"$ref": "#/$defs/pick"}, "allOf": {"allOf": [pick]}}[root]
    tools = {"pick": {**inner, **definitions}}
    rng, text, ended = random.Random(name), grammar(name, special, tools, parallel=False), 0
    for _ in range(3):
        if (answer := walk(text, special, rng)) is not None:
            ended += 1
            ((called, arguments),) = calls_in(name, answer, tools)[1]
            validate(json.loads(arguments), tools[called])
    assert ended
