"""`/v1/responses`: events, items, stored responses, and background responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stub import Script, Server, serving

from weft.engine.wire.messages import Finish
from weft.server.api import connection
from weft.server.api.responses import store as store_module
from weft.server.api.responses.records import STALE_SECONDS
from weft.server.errors import ApiError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
CALLS = (
    'Let me <tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>\n'
    '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\nx"}}</tool_call>'
)
TOOLS: Any = [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}]


async def respond(server: Server, input: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {"model": "stub", "input": input, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(server: Server, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {"input": "hi", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def parse(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named after its type."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if not block.startswith(":"):
            name, _, data = block.partition("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


async def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = await server.post(PATH, {"input": "hi", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events = parse(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types without repetition, shortened."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def sent(server: Server) -> str:
    return server.engine.tokenizer._hf.decode(server.engine.prompt())


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: without_ids(entry) for key, entry in value.items() if key not in hidden}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


# -- one answer


async def test_a_whole_answer(server: Server) -> None:
    server.engine.script = Script("hello world", cached_tokens=3)
    fields = {"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "unknown": [1]}
    body = await respond(server, temperature=0.5, **fields)
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    part = {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
    assert item == {
        "id": item["id"], "type": "message", "role": "assistant", "status": "completed", "content": [part],
    }  # fmt: skip
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert {**fields, **body} == {**body, "unknown": [1]}, "what is told is told back"
    assert server.engine.added[-1].params.temperature == 0.5


async def test_events_of_a_text_in_their_order(server: Server) -> None:
    events = await stream(server)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "hello world"
    whole = await respond(server)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert {e["item_id"] for e in events if "item_id" in e} == {events[-1]["response"]["output"][0]["id"]}


async def test_calls_are_items_of_their_own() -> None:
    async with serving(tool_call_parser="hermes") as server:
        server.engine.script = Script(CALLS)
        whole = await respond(server, tools=TOOLS)
        message, call, patch = whole["output"]
        assert message["content"][0]["text"] == "Let me"
        assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": [1, "é"]})
        assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin\nx")
        events = await stream(server, tools=TOOLS)
        assert kinds(events)[7:-1] == [
            "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
            "output_item.done",
        ]  # fmt: skip
        assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
        for i, item in enumerate(events[-1]["response"]["output"]):
            assert [e["item"] for e in events if e["type"].endswith("item.done")][i] == item


async def test_text_stays_at_its_position() -> None:
    async with serving(tool_call_parser="hermes") as server:
        for burst in (1, 4, 1000):
            server.engine.script = Script(CALLS.replace("\n<tool_call>", "\nand <tool_call>") + "\nDone.", burst=burst)
            whole = await respond(server, tools=TOOLS, max_output_tokens=260)
            types = [item["type"] for item in whole["output"]]
            assert types == ["message", "function_call", "message", "custom_tool_call", "message"]
            events = await stream(server, tools=TOOLS, max_output_tokens=260)
            assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


async def test_thinking_is_an_item_and_is_passed_back_to_the_template() -> None:
    async with serving(reasoning_parser="qwen3", tool_call_parser="hermes") as server:
        hf = server.engine.tokenizer._hf
        hf.chat_template = hf.chat_template.replace("message.content }}", "(message.reasoning_content or '') + ':' }}")
        server.engine.script = Script("<think>\nHm, so.\n</think>\n\nhello")
        requested = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "store": False}
        events = await stream(server, **requested)
        whole = await respond(server, **requested)
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        thought, message = whole["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
        assert message["content"][0]["text"] == "hello"
        spoken = [entry["token"] for entry in events[-1]["response"]["output"][1]["content"][0]["logprobs"]]
        assert "".join(spoken).strip().removesuffix("<|eos|>") == "hello"
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        del thought["content"]  # as clients keep it
        await respond(server, ["hi", thought, message, "more"])
        assert "<|assistant|>Hm, so.:" in sent(server)


async def test_the_fast_path_sends_the_same_as_the_slow_path(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.script = Script('héllo "quoted" \\ 😀 wörld\n\x00\u2028 end ' * 4)
    short = await stream(server, include=["message.output_text.logprobs"], top_logprobs=2)
    monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
    long = await stream(server, include=["message.output_text.logprobs"], top_logprobs=2)
    assert without_ids(short) == without_ids(long)
    part = short[-1]["response"]["output"][0]["content"][0]
    assert part["text"] == server.engine.script.text
    assert len(part["logprobs"]) == short[-1]["response"]["usage"]["output_tokens"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


async def test_a_truncated_answer_is_incomplete(server: Server) -> None:
    *_, last = await stream(server, max_output_tokens=1)
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert without_ids(last["response"]) == without_ids(await respond(server, max_output_tokens=1))


async def test_an_answer_without_text_is_an_empty_message(server: Server) -> None:
    server.engine.script = Script("")
    assert (await respond(server))["output"][0]["content"][0]["text"] == ""
    events = await stream(server)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_an_error_is_a_status_before_the_stream_and_an_event_in_it(server: Server) -> None:
    server.engine.script = Script("abc", stop_after=2, burst=1)
    response = asyncio.create_task(server.post(PATH, {"input": "hi", "stream": True}))
    await server.settle(lambda: bool(server.service.open) and server.engine.iterations > 0)
    (answer,) = server.service.open
    await server.settle(lambda: answer._started)  # type: ignore[attr-defined]
    answer.interrupt(ApiError(503, "The server is shutting down.", code="draining"), "drain")
    *_, done, last = parse((await response).text)
    assert done["type"] == "response.output_item.done"
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "draining", "message": "The server is shutting down."}
    error = await refused(server, input="x" * 100_000)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_a_client_that_disconnects_ends_its_answer(server: Server) -> None:
    server.engine.script = Script("a b c", stop_after=2)
    async with server.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
        await anext(response.aiter_lines())
    await server.settle(lambda: bool(server.engine.aborted))


# -- fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"include": ["nonsense"]}, "include[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "compaction"}]}, "input[0]"),
        ({"input": [{"type": ["x"]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}}, "text.format"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "A"}}, "reasoning.effort"),
        ({"prompt": {"id": "x"}}, "prompt"),
    ],
    ids=str,
)
async def test_unsupported_fields_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await refused(server, **fields))["param"] == param


async def test_built_in_tools_are_omitted_and_namespaces_are_kept() -> None:
    async with serving(tool_call_parser="hermes") as server:
        tools = [
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__box__", "tools": [{"type": "function", "name": "open"}]},
            {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        ]
        server.engine.script = Script('<tool_call>{"name": "mcp__box__open", "arguments": {}}</tool_call>')
        body = await respond(server, tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "mcp__box__open"}, {"type": "custom", "name": "p"}, {"type": "web_search"},
        ]})  # fmt: skip
        assert "web_search" not in sent(server)
        assert "start: X" in sent(server)
        (call,) = body["output"]
        assert (call["namespace"], call["name"]) == ("mcp__box__", "open")
        assert body["tools"] == tools


async def test_a_named_tool_is_enforced() -> None:
    async with serving(tool_call_parser="hermes") as server:
        for choice in ({"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}, "required"):
            await respond(server, tools=TOOLS, tool_choice=choice)
            assert server.engine.added[-1].params.grammar is not None
        await respond(server, tools=TOOLS, tool_choice="none")
        assert "patch" not in sent(server)


async def test_the_format_of_the_text(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    body = await respond(server, text={"format": form, "verbosity": "low"})
    assert server.engine.added[-1].params.grammar is not None
    assert body["text"] == {"format": {**form, "description": None}, "verbosity": "low"}
    await respond(server, text={"format": {"type": "text"}})
    assert server.engine.added[-1].params.grammar is None


async def test_the_oldest_items_are_dropped_with_truncation_auto(server: Server) -> None:
    turns = [{"role": role, "content": f"{role} {i} " + "x" * 60} for i in range(8) for role in ("user", "assistant")]
    items = [{"role": "developer", "content": "rules"}, *turns, {"role": "user", "content": "last"}]
    assert (await refused(server, input=items, max_output_tokens=8))["code"] == "context_length_exceeded"
    await respond(server, items, max_output_tokens=8, truncation="auto", instructions="be kind")
    prompt = sent(server)
    assert prompt.startswith("<|bos|><|system|>be kind\n\nrules<|user|>user ")
    assert "user 0" not in prompt
    assert prompt.endswith("assistant 7 " + "x" * 60 + "<|user|>last<|assistant|>")
    assert len(server.engine.prompt()) > 300


async def test_an_input_reports_its_token_count(server: Server) -> None:
    fields = {"input": "how many?", "instructions": "count"}
    counted = (await server.post(f"{PATH}/input_tokens", fields)).json()
    assert counted["input_tokens"] == (await respond(server, **fields))["usage"]["input_tokens"]


async def test_a_wrong_method_is_answered_with_the_allowed_ones(server: Server) -> None:
    answer = await server.http.put(f"{PATH}/resp_x", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")


# -- stored responses


async def test_a_stored_response_is_there_until_it_is_deleted(server: Server) -> None:
    made = await respond(server)
    url = f"{PATH}/{made['id']}"
    assert (await server.http.get(url)).json() == made
    assert (await server.http.delete(url)).json() == {"id": made["id"], "object": "response", "deleted": True}
    for gone in (await server.http.get(url), await server.http.delete(url), await server.post(f"{url}/cancel", {})):
        assert gone.status_code == 404
        assert gone.json()["error"]["type"] == "not_found_error"
    unkept = await respond(server, store=False)
    assert (await server.http.get(f"{PATH}/{unkept['id']}")).status_code == 404


async def test_a_conversation_continues_without_the_earlier_instructions(server: Server) -> None:
    one = await respond(server, "one", instructions="be kind")
    two = await respond(server, "two", previous_response_id=one["id"], instructions="be brief")
    assert sent(server) == "<|bos|><|system|>be brief<|user|>one<|assistant|>hello world<|user|>two<|assistant|>"
    await respond(server, "three", previous_response_id=two["id"], store=False)
    chain = "<|bos|><|user|>one<|assistant|>hello world<|user|>two<|assistant|>hello world<|user|>three<|assistant|>"
    assert sent(server) == chain
    items = (await server.http.get(f"{PATH}/{two['id']}/input_items", params={"order": "asc"})).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["one", "hello world", "two"]
    first = {"limit": 1, "after": items["data"][2]["id"]}
    page = (await server.http.get(f"{PATH}/{two['id']}/input_items", params=first)).json()
    assert [item["id"] for item in page["data"]] == [items["data"][1]["id"]]
    assert page["has_more"]
    await server.http.delete(f"{PATH}/{one['id']}")
    error = await refused(server, previous_response_id=two["id"])
    assert error["code"] == "previous_response_not_found"


async def test_items_are_referred_to_by_their_id(server: Server) -> None:
    one = await respond(server, "one")
    reference = {"type": "item_reference", "id": one["output"][0]["id"]}
    await respond(server, [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}])
    assert sent(server) == "<|bos|><|user|>one<|assistant|>hello world<|user|>two<|assistant|>"


async def test_a_conversation_object_grows(server: Server) -> None:
    made = (await server.post("/v1/conversations", {"items": [{"role": "user", "content": "one"}]})).json()
    url = f"/v1/conversations/{made['id']}"
    body = await respond(server, "two", conversation={"id": made["id"]})
    assert body["conversation"] == {"id": made["id"]}
    await respond(server, "three", conversation=made["id"])
    rendered = "<|bos|><|user|>one<|user|>two<|assistant|>hello world<|user|>three<|assistant|>"
    assert sent(server) == rendered
    items = (await server.http.get(f"{url}/items", params={"order": "asc"})).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["one", "two", "hello world", "three", "hello world"]
    one = f"{url}/items/{items[0]['id']}"
    assert (await server.http.get(one)).json() == items[0]
    assert (await server.http.delete(one)).json()["id"] == made["id"]
    assert (await server.http.get(one)).status_code == 404
    added = await server.post(f"{url}/items", {"items": [{"role": "user", "content": "four"}]})
    assert added.json()["data"][0]["content"][0]["text"] == "four"
    assert (await server.post(url, {"metadata": {"k": "v"}})).json()["metadata"] == {"k": "v"}
    assert (await server.http.get(url)).json()["metadata"] == {"k": "v"}
    assert (await server.http.delete(url)).json()["deleted"]
    assert (await server.http.get(url)).status_code == 404
    assert (await refused(server, 404, conversation=made["id"]))["param"] == "conversation"


async def test_a_key_sees_only_its_own_responses() -> None:
    async with serving(api_key=["a", "b"]) as server:
        ours, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
        made = (await server.post(PATH, {"input": "hi"}, headers=ours)).json()
        assert (await server.http.get(f"{PATH}/{made['id']}", headers=ours)).status_code == 200
        assert (await server.http.get(f"{PATH}/{made['id']}", headers=theirs)).status_code == 404
        for body in (
            {"previous_response_id": made["id"]},
            {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
        ):
            assert (await server.post(PATH, {"input": "x", **body}, headers=theirs)).status_code == 400
        assert (await server.http.delete(f"{PATH}/{made['id']}", headers=theirs)).status_code == 404
        assert (await server.http.get(f"{PATH}/{made['id']}")).status_code == 401


async def test_a_server_without_a_store_reports_so() -> None:
    async with serving(responses_max_mib=0) as server:
        body = await respond(server)
        assert body["store"] is False
        assert (await server.http.get(f"{PATH}/{body['id']}")).status_code == 404
        for fields in ({"background": True}, {"previous_response_id": body["id"]}, {"conversation": "conv_x"}):
            assert (await refused(server, **fields))["code"] == "storing_is_off"
        assert (await server.post("/v1/conversations", {})).status_code == 400


# -- in the background


async def ended(server: Server, id: str) -> dict[str, Any]:
    async with asyncio.timeout(240):
        while (body := (await server.http.get(f"{PATH}/{id}")).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return body


async def test_a_response_in_the_background_is_fetched_later(server: Server) -> None:
    server.engine.script = Script(gate=asyncio.Event())
    made = await respond(server, background=True)
    assert (made["status"], made["output"]) == ("queued", [])
    early = await refused(server, previous_response_id=made["id"])
    assert "still in_progress" in early["message"]
    assert server.engine.script.gate is not None
    server.engine.script.gate.set()
    body = await ended(server, made["id"])
    assert body["status"] == "completed"
    assert body["output"][0]["content"][0]["text"] == "hello world"
    again = await server.post(f"{PATH}/{made['id']}/cancel", {})
    assert again.json() == body, "what has ended is not cancelled"
    refusal = await server.http.get(f"{PATH}/{made['id']}", params={"stream": True})
    assert refusal.status_code == 400


async def test_a_response_in_the_background_can_be_cancelled_and_deleted(server: Server) -> None:
    server.engine.script = Script("a b c", stop_after=2)
    for stop in ("cancel", "delete"):
        made = await respond(server, background=True)
        await server.settle(lambda: bool(server.service.open))
        if stop == "cancel":
            body = (await server.post(f"{PATH}/{made['id']}/cancel", {})).json()
            assert (body["status"], body["error"]) == ("cancelled", None)
        else:
            assert (await server.http.delete(f"{PATH}/{made['id']}")).status_code == 200
        await server.settle(lambda: not server.service.open)
        assert server.engine.aborted == [each.handle for each in server.engine.added]
    not_ours = await respond(server, input="plain", max_output_tokens=1)
    assert (await server.post(f"{PATH}/{not_ours['id']}/cancel", {})).status_code == 400


async def test_a_stream_in_the_background_is_followed_from_anywhere(server: Server) -> None:
    events = await stream(server, background=True)
    assert kinds(events)[:3] == ["created", "queued", "in_progress"]
    assert kinds(events)[-1] == "completed"
    url = f"{PATH}/{events[0]['response']['id']}"
    for after in (-1, 0, 5, len(events) - 2, len(events)):
        rest = await server.http.get(url, params={"stream": "true", "starting_after": after})
        assert parse(rest.text) == events[after + 1 :]


async def test_a_stream_in_the_background_goes_on_when_its_client_leaves(server: Server) -> None:
    server.engine.script = Script("a b c", gate=asyncio.Event())
    body = {"input": "hi", "stream": True, "background": True}
    async with server.http.stream("POST", PATH, json=body) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "event: response.created"
        id = json.loads((await anext(lines)).removeprefix("data: "))["response"]["id"]
    assert server.engine.script.gate is not None
    server.engine.script.gate.set()
    assert (await ended(server, id))["output"][0]["content"][0]["text"] == "a b c"


async def test_a_failure_in_the_background_is_reported_to_the_poller(server: Server) -> None:
    server.engine.script = Script("a", finish=Finish.ABORT, error="it broke")
    for fields in ({}, {"stream": True}):
        if fields:
            id = (await stream(server, background=True, **fields))[-1]["response"]["id"]
        else:
            id = (await respond(server, background=True))["id"]
        body = await ended(server, id)
        assert (body["status"], body["error"]) == ("failed", {"code": "engine_error", "message": "it broke"})


async def test_a_response_whose_process_has_ended_has_failed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.script = Script(gate=asyncio.Event())
    made = await respond(server, background=True)
    assert (await server.http.get(f"{PATH}/{made['id']}")).json()["status"] == "in_progress"
    now = store_module.boottime()
    monkeypatch.setattr(store_module, "boottime", lambda: now + 2 * STALE_SECONDS)
    body = (await server.http.get(f"{PATH}/{made['id']}")).json()
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    monkeypatch.undo()
    await server.post(f"{PATH}/{made['id']}/cancel", {})


async def test_background_responses_fail_with_the_server() -> None:
    async with serving() as server:
        server.engine.script = Script("a b c", stop_after=2)
        await respond(server, background=True)
        await server.settle(lambda: bool(server.service.open))
    assert server.engine.aborted
