"""`structural_tag`: free text until a trigger, then the schema, in the old form and as a tree of formats."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from stub import Server
from test_tool_grammars import accepts, vocabulary

from weft.engine.errors import RequestError
from weft.server.tools.structural import structural_tag
from weft.server.tools.tools import marker_of

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": CITY}
ROME = '{"city": "Rome"}'


def _tag(begin: str, end: Any, content: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content or SCHEMA, "end": end}


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


ANY = {"type": "any_text"}
TAGS = [_tag("<f=weather>", "</f>"), _tag("<f=time>", "</f>", {"type": "json_schema", "json_schema": TIME})]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
LIST = {"type": "tags_with_separator", "tags": [_tag("<i>", "</i>")], "separator": ", "}
W, T = f"<f=weather>{ROME}</f>", "<f=time>{}</f>"

OLD = {
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=time>", "schema": TIME, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
THOUGHT = {"type": "sequence", "elements": [_tag("<think>", "</think>", ANY), TRIGGERED]}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLD,
        ["", "plain <text> </f>", W, f"let me see: {W}", f"{W} and {T} then", f"{W}{T}"],
        ["<f=", "x <f=other>", '<f=weather>{"city": "Paris"}</f>', f"<f=weather>{ROME}", f"a {W} <f="],
    ),
    ({"format": {**TRIGGERED, "at_least_one": True}}, [W, f"{W} text {T}."], ["", "text", f"text {W}"]),
    ({"format": {**TRIGGERED, "stop_after_first": True}}, ["text", f"text {W}"], [f"{W} more", f"{W}{T}"]),
    ({"format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}}, [W, T], ["", f"{W}{T}", f"a{W}"]),
    ({"format": {**TRIGGERED, "excludes": ["bad"]}}, [f"good {W} good"], [f"bad {W}", f"{W} bad", "bad"]),
    (
        {"format": {"type": "triggered_tags", "triggers": ["<a", "[b"], "tags": [_tag("<a>", ""), _tag("[b]", ".")]}},
        [f"x <a>{ROME} y [b]{ROME}. z", "< [ a b", f"[b]{ROME}."],
        ["<ab", f"[b]{ROME}", "x <a>"],
    ),
    ({"format": THOUGHT}, [f"<think>so <f= it is</think>Well: {W}", "<think></think>"], ["so", "<think>so", f"{W}"]),
    (
        {"format": {"type": "sequence", "elements": [ANY, _const("Answer: "), SCHEMA]}},
        [f"hm Answer: {ROME}", f"Answer: {ROME}"],
        ["hm", "Answer: Rome", f"hm Answer: {ROME} and"],
    ),
    (
        {"format": {"type": "sequence", "elements": [ANY, _tag("<o>", ["</o>", "</p>"])]}},
        [f"text <o>{ROME}</o>", f"<o>{ROME}</p>"],
        ["text", f"<o>{ROME}</q>"],
    ),
    ({"format": _tag("<r>", ["</r>", "."], ANY)}, ["<r>any text</r>", "<r>."], ["<r>a", "<r>a.b</r>"]),
    ({"format": _tag("<r>", "</r>", TRIGGERED)}, [f"<r>a {W} b</r>", "<r></r>"], [f"<r>{W}", "<r></r>x"]),
    ({"format": {"type": "or", "elements": [_const("yes"), SCHEMA]}}, ["yes", ROME], ["no", "yesyes"]),
    (
        {"format": {"type": "sequence", "elements": [{"type": "optional", "content": _const("a")}, _const("b")]}},
        ["ab", "b"],
        ["aab", "a"],
    ),
    ({"format": {"type": "star", "content": _const("ab")}}, ["", "abab"], ["aba"]),
    ({"format": {"type": "plus", "content": _const("ab")}}, ["ab", "abab"], [""]),
    ({"format": {"type": "repeat", "min": 1, "max": 2, "content": _const("a")}}, ["a", "aa"], ["", "aaa"]),
    ({"format": {"type": "regex", "pattern": "[A-Z]{2}/[0-9]"}}, ["AB/3"], ["AB3", "ab/3"]),
    (
        {"format": _tag("<g>", "</g>", {"type": "grammar", "grammar": 'root ::= "a" | "b" root'})},
        ["<g>bba</g>"],
        ["<g>bb</g>"],
    ),
    ({"format": {**LIST, "at_least_one": True}}, [f"<i>{ROME}</i>", f"<i>{ROME}</i>, <i>{ROME}</i>"], ["", "x"]),
    ({"format": LIST}, ["", f"<i>{ROME}</i>"], [f"<i>{ROME}</i>, "]),
    (
        {"format": {"type": "dispatch", "rules": [["#a ", SCHEMA], ["#b", _const(".")]]}},
        ["text", f"x #a {ROME} y #b. z"],
        ["x #a y", "#b"],
    ),
    ({"format": {**ANY, "excludes": ["no", "never"]}}, ["", "yes, n o"], ["I say no", "never"]),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("requested", "right", "wrong"), CASES, ids=[json.dumps(case[0])[:70] for case in CASES])
def test_only_the_requested_text_passes(
    requested: dict[str, Any], right: list[str], wrong: list[str], special: bool
) -> None:
    """`special`: marks such as <think> are single tokens."""
    grammar = structural_tag(requested, marker_of(vocabulary(special)[0]))
    for text in right:
        assert accepts(grammar, text, special), text
    for text in wrong:
        assert not accepts(grammar, text, special), text


@pytest.mark.parametrize("special", [False, True])
def test_a_trigger_that_is_a_single_token_is_one(special: bool) -> None:
    call = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [_tag("<tool_call>\n", "\n</tool_call>")]}
    grammar = structural_tag({"format": call}, marker_of(vocabulary(special)[0]))
    written = f"<tool_call>\n{ROME}\n</tool_call>"
    for text in (written, f"text {written} more {written}", "no call"):
        assert accepts(grammar, text, special), text
    for text in ("<tool_call>\nno", f"text {written[:-1]}"):
        assert not accepts(grammar, text, special), text


REFUSED = [
    ({"type": "any_tokens"}, "type 'any_tokens' is not supported; supported: const_string"),
    ({"type": ["x"]}, "is not supported"),
    ({}, "type 'None' is not supported"),
    ({**ANY, "max_tokens": 5}, "any_text: 'max_tokens' is not supported"),
    ({**SCHEMA, "style": "qwen_xml"}, "the style 'qwen_xml' is not supported"),
    ({**SCHEMA, "any_order": True}, "'any_order' is not supported"),
    ({**TRIGGERED, "new": 1}, "triggered_tags: 'new' is not supported"),
    ({"type": "json_schema"}, "json_schema needs 'json_schema'"),
    ({"type": "const_string", "value": 3}, "const_string needs a text 'value'"),
    ({"type": "sequence", "elements": []}, "needs a list 'elements' that is not empty"),
    ({"type": "sequence", "elements": ["x"]}, "must be a format"),
    ({"type": "sequence", "elements": [ANY, SCHEMA]}, "must be followed by a const_string or a tag, not 'json_schema'"),
    ({"type": "star", "content": ANY}, "star: free text cannot be repeated"),
    ({"type": "repeat", "min": 2, "max": 1, "content": SCHEMA}, "'max' must be -1, or no less than 'min'"),
    ({"type": "repeat", "min": True, "max": 1, "content": SCHEMA}, "must be integers"),
    (_tag("<a>", {"type": "token", "token": 1}), "'end' must be a text"),
    (_tag("<a>", ["", "b"], ANY), "an end must not be empty"),
    ({**TRIGGERED, "triggers": ["<g="]}, "'<f=weather>' starts with none of the triggers"),
    ({**TRIGGERED, "triggers": []}, "starts with none"),
    ({**TRIGGERED, "triggers": "<f="}, "'triggers' must be a list of texts"),
    ({**TRIGGERED, "tags": [SCHEMA]}, "'tags' must be tags, not 'json_schema'"),
    ({"type": "dispatch", "rules": [["a", SCHEMA], ["ba", SCHEMA]]}, "the trigger 'ba' contains another one, 'a'"),
    ({"type": "dispatch", "rules": [["a", SCHEMA], ["ab", SCHEMA]]}, "the trigger 'ab' starts with another one, 'a'"),
    ({"type": "dispatch", "rules": [["a"]]}, "pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "words"), REFUSED, ids=[case[1] for case in REFUSED])
def test_formats_that_a_grammar_cannot_express_are_named(form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        structural_tag({"format": form}, json.dumps)


@pytest.mark.asyncio(loop_scope="module")
async def test_all_request_forms_are_accepted(server: Server) -> None:
    for more in (
        {"response_format": {"type": "structural_tag", **OLD}},
        {"response_format": {"type": "structural_tag", "format": TRIGGERED}},
        {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": TRIGGERED}}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **OLD})}},
    ):
        await server.complete(**more)
        await server.chat(**more)
        sent = {message.params.grammar for message in server.engine.added[-2:]}
        (grammar,) = sent
        assert grammar is not None
        assert accepts(grammar, f"see: {W}", False)
        assert not accepts(grammar, "<f=x", False)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs format, or structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": OLD["structures"]}},
            "response_format",
            "triggers",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format", "'token'"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", ""),
        ({"structured_outputs": {"structural_tag": 3}}, "structured_outputs.structural_tag", "an object, or its text"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_over_http_it_is_refused_with_its_field(
    server: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    for path, body in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await server.post(f"/v1/{path}", {**body, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
