"""Schemas of tools and structured outputs: null counts as absent, errors name the tool, `strict` is kept or refused."""

from __future__ import annotations

from typing import Any

import pytest
from stub import Server
from vocabularies import byte_level, wrapped

from weft.engine.errors import RequestError
from weft.engine.wire.grammar_text import json_schema
from weft.engine.wire.json_schemas import without_nulls
from weft.server.api.chat_message import ChatMessage
from weft.server.api.protocol import ChatBody
from weft.server.errors import ApiError
from weft.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NULLS = {
    "type": "object",
    "title": None,
    "properties": {
        "a": {"type": "string", "description": None, "enum": None, "default": None, "items": None, "minLength": None},
        "b": {"type": ["string", None], "enum": ["x", None]},
        "c": None,
        "d": {"const": None},
        "e": {"type": "array", "items": None},
        "f": {"anyOf": [{"type": "integer"}, None], "$ref": None, "allOf": None},
        "g": {"type": "object", "properties": None, "required": None, "additionalProperties": None},
    },
    "required": None,
    "additionalProperties": None,
    "$defs": None,
}
CLEAN = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "default": None},
        "b": {"type": ["string", "null"], "enum": ["x", None]},
        "c": {},
        "d": {"const": None},
        "e": {"type": "array"},
        "f": {"anyOf": [{"type": "integer"}]},
        "g": {"type": "object"},
    },
}
PICKY = (
    "{% for t in tools %}{% set f = t.function %}{{ f.name }}"
    "{% if f.description is defined %}{{ ': ' + f.description }}{% endif %}"
    "{% if f.parameters is defined %}{% if f.parameters.required is defined %}"
    "{{ f.parameters.required | join(', ') }}{% endif %}{% for name, p in f.parameters.properties.items() %}{{ name }}"
    "{% if p.description is defined %}{{ ': ' + p.description }}{% endif %}"
    "{% if p.enum is defined %}{% for one in p.enum %}{{ one }}{% endfor %}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


async def post(server: Server, **body: Any) -> Any:
    return await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})


def rendered(*tools: dict[str, Any]) -> str:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": list(tools)})
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=PICKY))
    return tokenizer.render_chat(body.messages, body.template_arguments(None, PICKY))


async def test_null_is_absent_in_a_schema() -> None:
    assert without_nulls(NULLS) == CLEAN
    assert list(without_nulls({"z": 1, "a": None, "b": 2})) == ["z", "b"]
    assert json_schema(NULLS) == json_schema(CLEAN)


@pytest.mark.parametrize("choice", ["auto", "required", None, {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize(
    "parameters", [NULLS, {"type": "object", "properties": None}, {"type": "object", "required": None}, {}, None]
)
@pytest.mark.parametrize("strict", [None, True])
async def test_tools_may_have_nulls(hermes: Server, choice: Any, parameters: Any, strict: bool | None) -> None:
    given = tool(parameters, description=None, strict=strict) | {"cache_control": None}
    response = await post(hermes, tools=[given], tool_choice=choice)
    assert response.status_code == 200, response.text


async def test_other_dialects_may_have_nulls(hermes: Server) -> None:
    given = {"name": "f", "description": None}
    messages = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    for choice in ({"type": "auto"}, {"type": "any"}):
        body = {**messages, "tools": [{**given, "input_schema": NULLS}], "tool_choice": choice}
        assert (await hermes.post("/v1/messages", body)).status_code == 200
    for mode in ("auto", "required"):
        tools = [{"type": "function", "parameters": NULLS, "strict": None, **given}]
        assert (
            await hermes.post("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": mode})
        ).status_code == 200


async def test_errors_of_other_dialects_have_their_field_names(hermes: Server) -> None:
    schema, name = {"type": "object", "properties": 5}, {"name": "f"}
    tools: list[dict[str, Any]] = [{"type": "function", "parameters": schema, **name}]
    response = await hermes.post("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": "required"})
    assert response.json()["error"]["param"] == "tools[0].parameters"
    assert response.json()["error"]["message"] == "tools[0].parameters: properties must be an object"
    body = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    asked = {"tools": [{"input_schema": schema, **name}], "tool_choice": {"type": "any"}}
    response = await hermes.post("/v1/messages", body | asked)
    assert response.json()["error"]["message"] == "tools[0].input_schema: properties must be an object"


async def test_structured_outputs_may_have_nulls(hermes: Server) -> None:
    schema = {"name": "x", "schema": NULLS, "strict": True, "description": None}
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"structured_outputs": {"json": NULLS, "regex": None}},
        {"guided_json": NULLS},
    ):
        response = await post(hermes, **body)
        assert response.status_code == 200, response.text


async def test_templates_do_not_see_nulls() -> None:
    assert rendered(tool(NULLS, description=None)) == "fabxNonecdefghi"
    assert rendered(tool(None)) == "fhi"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (None, "{}"),
        ("", "{}"),
        (" ", "{}"),
        ("null", "{}"),
        ("[]", "{}"),
        ('""', "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ("no json", '"no json"'),
    ],
)
async def test_earlier_calls_reach_templates_as_objects(sent: str | None, shown: str) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": sent}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert Tokenizer(wrapped(byte_level(), chat_template=template)).render_chat([message], {}) == shown


async def test_an_error_of_the_template_names_the_tool() -> None:
    with pytest.raises(ApiError) as caught:
        rendered(tool(None), tool({"type": "object", "properties": ["a"]}))
    assert caught.value.status == 400
    assert caught.value.param == "tools[1].function.parameters"
    assert caught.value.message.startswith("tools[1].function.parameters: the chat template cannot render this schema")
    with pytest.raises(ApiError) as caught:
        rendered(tool({"type": "object", "properties": {"a": {"description": 5}}}))
    assert caught.value.param == "tools[0].function.parameters"
    assert "str" not in caught.value.message


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": 5}, "properties must be an object"),
        ({"type": "object", "properties": {"a": {"type": "x"}}}, "type: x"),
    ],
)
async def test_an_error_of_a_grammar_names_the_tool(hermes: Server, parameters: Any, reason: str) -> None:
    tools = [{"type": "function", "function": {"name": "g"}}, tool(parameters)]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        response = await post(hermes, tools=tools, tool_choice=choice)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert error["message"].startswith("tools[1].function.parameters: ")
        assert reason in error["message"]
        assert "call_" not in error["message"]
        assert "|" not in error["message"]


BOOLEAN = {"type": "boolean"}
REPEATED: list[dict[str, Any]] = [
    {"type": "object", "patternProperties": {"^x$": BOOLEAN}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 2},
    {"minProperties": 3},
    {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"], "minProperties": 2},
    {"type": "array", "items": {"type": "object", "minProperties": 2}},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/m"}},
        "$defs": {"m": {"type": "object", "minProperties": 2}},
    },
    {"allOf": [{"type": "object", "patternProperties": {"^x$": BOOLEAN}}, {"minProperties": 2}]},
]
KEPT: list[dict[str, Any]] = [
    {"type": "object", "patternProperties": {"^x$": BOOLEAN}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "properties": {"a": BOOLEAN, "b": BOOLEAN}, "required": ["a", "b"], "minProperties": 2},
    {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2},
    {"type": "object", "properties": {"minProperties": {"const": 2}}},
    {"enum": [{"minProperties": 2}]},
]


@pytest.mark.parametrize("schema", REPEATED)
async def test_strict_schemas_that_repeated_names_could_satisfy_are_refused(hermes: Server, schema: Any) -> None:
    with pytest.raises(RequestError, match="could be repeated"):
        json_schema(schema)
    json_schema(schema, lenient=True)
    given = {"name": "x", "schema": schema}
    for strict, status in ((True, 400), (False, 200)):
        asked = {"type": "json_schema", "json_schema": given | {"strict": strict}}
        response = await post(hermes, response_format=asked)
        assert response.status_code == status, response.text
    assert (await post(hermes, structured_outputs={"json": schema})).status_code == 400
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/s"}},
        "$defs": {"s": schema, **schema.get("$defs", {})},
    }
    for choice in ("auto", "required"):
        response = await post(hermes, tools=[tool(parameters, strict=True)], tool_choice=choice)
        assert response.status_code == 400, choice
        assert response.json()["error"]["param"] == "tools[0].function.parameters"
        assert (await post(hermes, tools=[tool(parameters)], tool_choice=choice)).status_code == 200


@pytest.mark.parametrize("schema", KEPT)
async def test_strict_schemas_that_can_be_kept_are_accepted(hermes: Server, schema: Any) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    response = await post(hermes, response_format=asked)
    assert response.status_code == 200, response.text


async def test_a_required_strict_call_refuses_keywords_that_cannot_be_enforced(hermes: Server) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict, status in ((True, 400), (False, 200)):
        response = await post(hermes, tools=[tool(parameters, strict=strict)], tool_choice="required")
        assert response.status_code == status, response.text
    assert (await post(hermes, tools=[tool(parameters, strict=True)])).status_code == 200
