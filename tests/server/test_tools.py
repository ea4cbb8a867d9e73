"""Tools through the chat endpoint: the template renders them, calls are returned as such, `tool_choice` is a
constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stub import Script, Server

from weft.engine.wire import grammar_text
from weft.engine.wire.messages import Finish

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/int"}},
            "required": ["a"],
            "$defs": {"int": {"type": "integer"}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}
TWO_CALLS = (
    'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def hermes(hermes: Server) -> Server:
    hermes.engine.script = Script(TWO_CALLS)
    return hermes


async def streamed(server: Server, **body: Any) -> list[Any]:
    messages = [{"role": "user", "content": "hi"}]
    response = await server.post("/v1/chat/completions", {"messages": messages, "stream": True, **body})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_calls_are_returned_separately_from_the_text(hermes: Server) -> None:
    choice = (await hermes.chat(tools=[ADD, NOW]))["choices"][0]
    message = choice["message"]
    assert message["content"] == "Let me see."
    calls = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert calls == [
        ("function", {"name": "add", "arguments": '{"a": 1}'}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert hermes.engine.added[-1].params.grammar is None


async def test_content_is_null_with_only_calls(hermes: Server) -> None:
    hermes.engine.script = Script('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    message = (await hermes.chat(tools=[NOW]))["choices"][0]["message"]
    assert message["content"] is None


async def test_an_answer_without_calls_is_plain(hermes: Server) -> None:
    hermes.engine.script = Script("no calls <here>")
    choice = (await hermes.chat(tools=[NOW]))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "no calls <here>", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_calls_are_streamed_as_deltas(hermes: Server) -> None:
    first, *chunks = await streamed(hermes, tools=[ADD, NOW], n=2)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in choices) == "Let me see."
        deltas = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        assert len(deltas) > 2, "arguments come in pieces"
        for call, (name, arguments) in enumerate([("add", '{"a": 1}'), ("now", "{}")]):
            begin, *rest = [delta for delta in deltas if delta["index"] == call]
            assert (begin["function"]["name"], begin["type"]) == (name, "function")
            assert begin["id"]
            assert all("id" not in delta for delta in rest)
            assert "".join(delta["function"]["arguments"] for delta in (begin, *rest)) == arguments
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
        empty = [c for c in choices if not c["delta"] and c["finish_reason"] is None]
        assert empty == []


async def test_only_one_call_if_parallel_calls_are_disabled(hermes: Server) -> None:
    message = (await hermes.chat(tools=[ADD, NOW], parallel_tool_calls=False))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]


async def test_the_template_is_given_the_tools(hermes: Server) -> None:
    await hermes.chat(tools=[ADD])
    with_tools = hermes.engine.tokenizer.decode(hermes.engine.prompt())
    assert json.dumps(ADD) in with_tools
    await hermes.chat(tools=[ADD], tool_choice="none")
    assert hermes.engine.tokenizer.decode(hermes.engine.prompt()) == "hi"
    counted = await hermes.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "tools": [ADD]})
    assert counted.json()["count"] > len(hermes.engine.prompt())


async def test_none_leaves_the_text_unchanged(hermes: Server) -> None:
    choice = (await hermes.chat(tools=[ADD], tool_choice="none"))["choices"][0]
    assert choice["message"]["content"] == TWO_CALLS
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("required", True, TWO_CALLS.removeprefix("Let me see."), "Let me see."),
        ("required", False, '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>', TWO_CALLS[11:]),
        (NAMED, True, TWO_CALLS[TWO_CALLS.rindex("<tool_call>") :], TWO_CALLS[11:]),
    ],
    ids=["required", "one", "named"],
)
async def test_a_required_call_is_a_constraint(
    hermes: Server, choice: Any, parallel: bool, good: str, bad: str
) -> None:
    body = await hermes.chat(tools=[ADD, NOW], tool_choice=choice, parallel_tool_calls=parallel)
    grammar = hermes.engine.added[-1].params.grammar
    assert grammar is not None
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)
    expected = "stop" if choice is NAMED else "tool_calls"
    assert body["choices"][0]["finish_reason"] == expected


def accepts(grammar: str, text: str) -> bool:
    """Return whether the whole text is in the grammar's language, decided byte by byte."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=grammar_text.LIMITS)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


async def test_an_unknown_family_can_still_be_made_to_call(server: Server) -> None:
    server.engine.script = Script('{"name": "add", "parameters": {"a": 1}}')
    choice = (await server.chat(tools=[ADD], tool_choice="required"))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    assert accepts(grammar, '{"name": "add", "parameters": {"a": 1}}')
    assert not accepts(grammar, '{"name": "add", "parameters": {"a": "1"}}')


STRUCTURED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
        "17",
        '"17"',
    ),
    ({"structured_outputs": {"json": {"enum": ["é", 2]}}}, '"é"', '"e"'),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true", "yes"),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "a+b"}}, "aab", "aa"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'root ::= "x" root | "y"'}}, "xxy", "xx"),
    ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, "xxy", "xx"),
    ({"guided_json": {"type": "integer"}}, "5", "x"),
    ({"guided_regex": "[0-9]"}, "5", "55"),
    ({"guided_choice": ["a\nb"]}, "a\nb", "ab"),
    ({"guided_grammar": 'root ::= "z"'}, "z", "zz"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), STRUCTURED, ids=str)
async def test_structured_outputs_become_grammars(server: Server, fields: dict[str, Any], good: str, bad: str) -> None:
    await server.complete(**fields)
    await server.chat(**fields)
    await streamed(server, **fields)
    grammars = {added.params.grammar for added in server.engine.added}
    assert len(server.engine.added) == 3
    (grammar,) = grammars
    assert grammar is not None
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


async def test_plain_text_needs_no_grammar(server: Server) -> None:
    for fields in ({"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}):
        await server.complete(**fields)
        assert server.engine.added[-1].params.grammar is None


async def test_a_constraint_refused_by_the_engine_is_a_client_error(server: Server) -> None:
    from weft.engine.wire.messages import Finish

    server.engine.script = Script(finish=Finish.REFUSED, ids=[-1], error="the grammar cannot be used: why")
    for stream in (False, True):
        body = {"prompt": "hi", "guided_regex": "a", "stream": stream, "ignore_eos": True}
        response = await server.post("/v1/completions", body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["message"], error["param"]) == ("the grammar cannot be used: why", "guided_regex")


async def test_a_constraint_beyond_the_engines_memory_may_be_retried(server: Server) -> None:
    from weft.engine.wire.messages import Finish

    server.engine.script = Script(finish=Finish.BUSY, ids=[-1], error="not now")
    response = await server.post("/v1/completions", {"prompt": "hi", "guided_regex": "a", "ignore_eos": True})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_busy")
    assert response.headers["retry-after"]


async def test_a_strict_tool_is_enforced_under_auto(hermes: Server) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    assert (await hermes.chat(tools=[strict, NOW]))["choices"][0]["finish_reason"] == "tool_calls"
    grammar = hermes.engine.added[-1].params.grammar
    assert grammar is not None
    call = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
    assert accepts(grammar, "Only text.")
    assert accepts(grammar, "So: " + call % '{"a": 1}')
    assert not accepts(grammar, "So: " + call % '{"a": "one"}')


@pytest.mark.parametrize(("finish", "arguments"), [(None, '{"a": "b c"}'), (Finish.LENGTH, '{"a": "b c')])
async def test_only_a_call_that_the_model_ended_is_completed(
    hermes: Server, finish: Finish | None, arguments: str
) -> None:
    hermes.engine.script = Script('<tool_call>\n{"name": "add", "arguments": {"a": "b c', finish=finish)
    choice = (await hermes.chat(tools=[ADD]))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": arguments}


async def test_logprobs_have_an_entry_for_each_token_of_calls_and_content(hermes: Server) -> None:
    answer = await hermes.chat(tools=[ADD], logprobs=True)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert "".join(token["token"] for token in tokens[:-1]) == TWO_CALLS
    assert answer["choices"][0]["message"]["content"] == "Let me see."


async def test_strict_tools_without_a_possible_grammar_are_accepted_unenforced(hermes: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    strict = {"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}
    await hermes.chat(tools=[strict])
    assert hermes.engine.added[-1].params.grammar is None
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [strict], "tool_choice": "required"}
    response = await hermes.post("/v1/chat/completions", body)
    assert response.status_code == 400
