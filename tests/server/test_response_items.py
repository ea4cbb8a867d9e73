"""Items of the Responses API as messages, and the parts of an answer as items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.server.api.responses.items import read_input, seal, to_messages, unseal
from weft.server.api.responses.output import Output
from weft.server.api.turn_parser import Parts
from weft.server.tools.stream import Call

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}


def messages_of(input: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    messages = to_messages(instructions, read_input(input))
    return [message.model_dump(exclude_none=True) for message in messages]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_string_is_the_users_message() -> None:
    assert messages_of("hi", "be kind") == [{"role": "system", "content": "be kind"}, user("hi")]


def test_leading_instructions_are_one_message_and_later_ones_keep_their_position() -> None:
    later = {"role": "developer", "content": "and now"}
    items = [{"role": "developer", "content": "a"}, {"type": "message", "role": "system", "content": "b"}, user("x")]
    assert messages_of([*items, later, user("y")], "first") == [
        {"role": "system", "content": "first\n\na\n\nb"}, user("x"), later, user("y"),
    ]  # fmt: skip


def test_a_turn_of_the_assistant_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    spoken = {"role": "assistant", "content": [{"type": "output_text", "text": "I call"}]}
    second = {**CALL, "call_id": "c2", "name": "g"}
    first, answer, *rest = messages_of([user("x"), thought, spoken, CALL, second, RESULT, {**RESULT, "call_id": "c2"}])
    assert first == user("x")
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "I call")
    assert [(call["id"], call["function"]["name"]) for call in answer["tool_calls"]] == [("c1", "f"), ("c2", "g")]
    assert rest == [{"role": "tool", "content": "done", "tool_call_id": id} for id in ("c1", "c2")]


def test_calls_with_a_result_between_are_two_messages() -> None:
    again = {**CALL, "call_id": "c2"}
    assert [message["role"] for message in messages_of([CALL, RESULT, again, user("x")])] == [
        "assistant", "tool", "assistant", "user",
    ]  # fmt: skip


def test_the_call_of_a_custom_tool_is_that_of_a_function_of_one_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'é\n"x"', "namespace": "ns"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]}
    made, result = messages_of([call, output])
    function = made["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("ns__patch", {"input": 'é\n"x"'})
    assert result["content"] == "ok"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": "other"}, "a"),
        ({"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": seal("löng")}, "löng"),
        ({"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "gAAAA"}, "short"),
        ({"summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]}, "a\nb"),
    ],
)
def test_reasoning_is_restored_from_the_clients_copy(fields: dict[str, Any], text: str) -> None:
    (message,) = messages_of([{"type": "reasoning", "id": "rs_1", **fields}])
    assert message["reasoning_content"] == text


def test_the_output_of_other_servers_tools_is_skipped() -> None:
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert messages_of([{"type": "web_search_call", "id": "ws_1", "status": "completed"}, empty, user("x")]) == [
        user("x")
    ]


def test_actions_of_a_shell_are_calls() -> None:
    call = {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}, "status": "completed"}
    made, result = messages_of([call, {"type": "local_shell_call_output", "call_id": "c", "output": "a b"}])
    assert made["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": '{"command": ["ls"]}'}
    assert result["content"] == "a b"


@pytest.mark.parametrize("broken", ["weft1:é", "weft1:a", "weft1:/w==", "", "weft1"])
def test_unsealed_content_is_ignored(broken: str) -> None:
    assert unseal(broken) == ""


# -- from answers to items


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split(b"data: ")[1]) for block in data.split(b"\n\n")[:-1]]


def fed(output: Output, *parts: Parts) -> list[dict[str, Any]]:
    data = b"".join(output.feed(part) for part in parts) + output.end()
    events = events_of(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def thought(text: str) -> Parts:
    return Parts(text, "", [])


def text(text: str) -> Parts:
    return Parts("", text, [])


@pytest.mark.parametrize("as_summary", [False, True])
def test_reasoning_is_an_item_before_the_text(as_summary: bool) -> None:
    output = Output("0" * 32, namespaces={}, as_summary=as_summary, sealed=True)
    events = fed(output, thought("let "), thought("me"), text("42"))
    item, message = output.items
    part = {"type": "summary_text" if as_summary else "reasoning_text", "text": "let me"}
    assert item["summary" if as_summary else "content"] == [part]
    assert unseal(item["encrypted_content"]) == "let me"
    assert message["content"][0]["text"] == "42"
    names = [event["type"].removeprefix("response.") for event in events]
    delta = "reasoning_summary_text" if as_summary else "reasoning_text"
    part_name = "reasoning_summary_part" if as_summary else "content_part"
    assert names[:7] == [
        "output_item.added", f"{part_name}.added", f"{delta}.delta", f"{delta}.delta", f"{delta}.done",
        f"{part_name}.done", "output_item.done",
    ]  # fmt: skip
    assert to_messages(None, read_input(output.items))[0].reasoning_content == "let me"


def test_white_space_between_calls_is_not_a_message() -> None:
    def calls(*calls: Call) -> Parts:
        return Parts("", "", list(calls))

    output = Output("0" * 32, namespaces={}, may_call=True)
    begun = Call(0, "", "c1", "f"), Call(0, '{"a"'), Call(0, ": 1}")
    fed(output, text("\n"), calls(*begun), text("\n"), calls(Call(1, "{}", "c2", "g")), text("\n"))
    assert [(item["name"], item["arguments"]) for item in output.items] == [("f", '{"a": 1}'), ("g", "{}")]
    output = Output("0" * 32, namespaces={}, may_call=True)
    fed(output, text(" "), text("\n"), text("x "), text(" "))
    assert [item["content"][0]["text"] for item in output.items] == [" \nx  "]
    output = Output("0" * 32, namespaces={}, may_call=True)
    fed(output, text("\n"))
    assert output.items[0]["content"][0]["text"] == "\n"
