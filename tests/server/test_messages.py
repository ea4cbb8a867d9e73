"""Anthropic's Messages API: converted requests, answers, whole and streamed, and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from stub import Script, Server, serving

from weft.server.api.messages_protocol import CountTokensBody
from weft.server.api.service import Phase

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALLS = (
    'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    response = await server.post("/v1/messages", {"model": "stub", "max_tokens": 200, "messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "stub", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    response = await server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream. Checks the order of its events."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    blocks, partial, is_open = message["content"], "", False
    for event in middle:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            partial, is_open = "", True
            continue
        assert is_open
        if event["type"] == "content_block_stop":
            is_open = False
            if partial:
                blocks[-1]["input"] = json.loads(partial)
            continue
        assert event["type"] == "content_block_delta"
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                blocks[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                blocks[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                blocks[-1]["signature"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                partial += text
            case other:
                raise AssertionError(other)
    assert not is_open
    message.update(delta["delta"])
    message["usage"].update(delta["usage"])
    return message


async def both(server: Server, **fields: Any) -> dict[str, Any]:
    """The whole answer. Checks that the stream gives the same."""
    whole = await ask(server, **fields)
    streamed = assembled(await stream(server, **fields))
    ignored = {"id", *("content" for block in whole["content"] if block["type"] == "tool_use")}
    assert {k: v for k, v in streamed.items() if k not in ignored} == {
        k: v for k, v in whole.items() if k not in ignored
    }
    without_ids = [[{**block, "id": ""} for block in answer["content"]] for answer in (whole, streamed)]
    assert without_ids[0] == without_ids[1]
    return whole


def rendered(server: Server, i: int = -1) -> str:
    return server.engine.tokenizer._backend.decode(server.engine.prompt(i), skip_special_tokens=False)


async def test_an_answer(server: Server) -> None:
    server.engine.script = Script(cached_tokens=2)
    answer = await both(server)
    assert answer["id"].startswith("msg_")
    prompt, output = len(server.engine.prompt()), len(server.engine.tokenizer.encode("hello world")) + 1
    assert {key: value for key, value in answer.items() if key != "id"} == {
        "type": "message",
        "role": "assistant",
        "model": "stub",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": output,
        },
    }


async def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "priority": 3, "cache_salt": "x", "max_tokens": 9}
    await ask(server, **fields)
    added = server.engine.added[-1]
    got = (added.params.temperature, added.params.top_p, added.params.top_k, added.params.max_tokens)
    assert got == (0.5, 0.25, 7, 9)
    assert (added.priority, added.cache_salt) == (3, "x")


async def test_stop_sequences(server: Server) -> None:
    answer = await both(server, stop_sequences=["zzz", "wor", *map(str, range(10))])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "wor")
    assert answer["content"] == [{"type": "text", "text": "hello "}]


async def test_an_answer_ends_at_its_limit_or_at_that_of_the_context(server: Server) -> None:
    assert (await both(server, max_tokens=1))["stop_reason"] == "max_tokens"
    server.engine.script = Script("hello " * 1000)
    answer = await both(server, max_tokens=10**6)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 512


async def test_zero_tokens_only_for_a_retained_prompt(server: Server) -> None:
    answer = await both(server, max_tokens=0)
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert server.engine.added[-1].params.max_tokens == 1


async def test_a_system_prompt_is_the_first_message(server: Server) -> None:
    for system in ("be kind", [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]):
        await ask(server, system=system)
        assert rendered(server) == "<|bos|><|system|>be kind<|user|>hi<|assistant|>"
    await ask(server, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert "<|system|>a\nb<|user|>" in rendered(server)


async def test_a_system_message_in_the_middle_stays_there(server: Server) -> None:
    messages = [*HI, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "now short"}, *HI]
    await ask(server, system="be kind", messages=messages)
    assert rendered(server).startswith("<|bos|><|system|>be kind<|user|>hi<|assistant|>yes<|system|>now short<|user|>")


async def test_nonces_of_clients_are_removed_from_the_prompt(server: Server) -> None:
    prompts = []
    for nonce in ("a1b2c", "d3e4f"):
        header = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};",
        }
        await ask(server, system=[header, {"type": "text", "text": "be kind"}])
        prompts.append(rendered(server))
        system = {"role": "system", "content": f"{header['text']}\nbe kind"}
        await server.chat(messages=[system, *HI])
        prompts.append(rendered(server))
    assert set(prompts) == {"<|bos|><|system|>be kind<|user|>hi<|assistant|>"}
    conversation = [{"role": "user", "content": "x-anthropic-billing-header: what is it?"}]
    await ask(server, messages=conversation)
    assert "billing" in rendered(server)


async def test_an_assistants_last_message_is_continued(server: Server) -> None:
    await ask(server, messages=[*HI, {"role": "assistant", "content": [{"type": "text", "text": "well"}]}])
    assert rendered(server) == "<|bos|><|user|>hi<|assistant|>well"


async def test_blocks_of_a_conversation_with_tools() -> None:
    body = CountTokensBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 1, "a": [2]}},
                        {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                        {"type": "text", "text": "go on"},
                        {
                            "type": "document",
                            "title": "T",
                            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                        },
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
            ]
        }
    )
    assert body.as_chat()["messages"] == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"b":1,"a":[2]}'}},
                {"id": "t2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "go on\nT\nD"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    ]


async def test_calls_are_blocks(hermes: Server) -> None:
    hermes.engine.script = Script(CALLS)
    answer = await both(hermes, tools=[ADD, NOW])
    assert answer["stop_reason"] == "tool_use"
    text, add, now = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (add["type"], add["name"], add["input"]) == ("tool_use", "add", {"a": 1})
    assert (now["type"], now["name"], now["input"]) == ("tool_use", "now", {})
    assert len({add["id"], now["id"]}) == 2
    one = await both(hermes, tools=[ADD, NOW], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]


async def test_pieces_of_any_size_make_the_same_blocks(hermes: Server) -> None:
    answers = []
    for burst in (1, 2, 5, 1000):
        hermes.engine.script = Script(CALLS, burst=burst)
        answers.append(assembled(await stream(hermes, tools=[ADD, NOW])))
        for block in answers[-1]["content"]:
            block.pop("id", None)
    assert all(answer["content"] == answers[0]["content"] for answer in answers)


async def test_white_space_before_a_call_is_not_a_block(hermes: Server) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    hermes.engine.script = Script(f"\n\n{call}")
    assert [block["type"] for block in (await both(hermes, tools=[NOW]))["content"]] == ["tool_use"]
    hermes.engine.script = Script(" \n")
    assert (await both(hermes, tools=[NOW]))["content"] == [{"type": "text", "text": " \n"}]
    hermes.engine.script = Script(" \nso")
    assert (await both(hermes, tools=[NOW]))["content"] == [{"type": "text", "text": " \nso"}]


async def test_a_truncated_call_is_sent_as_far_as_it_goes(hermes: Server) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "xyz'
    hermes.engine.script = Script(text)
    answer = await ask(hermes, tools=[ADD], max_tokens=len(hermes.engine.tokenizer.encode(text)))
    assert answer["stop_reason"] == "max_tokens"
    (block,) = answer["content"]
    assert block["name"] == "add"
    assert block["input"] == {"a": 12, "b": "xyz"}


async def test_tool_choices(hermes: Server) -> None:
    constrained = []
    for choice in ("auto", "any", "none", "tool"):
        named = {"name": "now"} if choice == "tool" else {}
        hermes.engine.script = Script('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        answer = await ask(hermes, tools=[ADD, NOW], tool_choice={"type": choice, **named})
        constrained.append(hermes.engine.added[-1].params.grammar)
        assert answer["stop_reason"] == ("end_turn" if choice == "none" else "tool_use")
    assert [grammar is not None for grammar in constrained] == [False, True, False, True]
    assert '"name": \\"add\\"' not in str(constrained[3])
    assert "add" in str(constrained[1])


async def test_tools_are_rendered_in_the_order_given(hermes: Server) -> None:
    prompts = []
    for tools in ([ADD, NOW], [ADD, NOW], [NOW, ADD]):
        await ask(hermes, tools=tools)
        prompts.append(rendered(hermes))
    assert prompts[0] == prompts[1]
    assert prompts[0].index('"add"') < prompts[0].index('"now"')
    assert prompts[2].index('"now"') < prompts[2].index('"add"')


async def test_thinking_is_a_block_and_is_passed_back_to_the_template() -> None:
    async with serving(reasoning_parser="qwen3", tool_call_parser="hermes") as server:
        for burst in (1, 3, 1000):
            server.engine.script = Script(f"<think>\nI look.\n</think>\n\n{CALLS}", burst=burst)
            answer = await both(server, tools=[ADD, NOW], thinking={"type": "enabled", "budget_tokens": 50})
            thinking, text, *calls = answer["content"]
            assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "I look.")
            assert thinking["signature"]
            assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
            assert [call["name"] for call in calls] == ["add", "now"]
        body = CountTokensBody.model_validate({"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 50}})
        assert {"enable_thinking": True, "max_thinking_tokens": 50}.items() <= body.as_chat().items()
        body = CountTokensBody.model_validate({"messages": HI, "thinking": {"type": "disabled"}})
        assert body.as_chat()["enable_thinking"] is False
        assert "enable_thinking" not in CountTokensBody.model_validate({"messages": HI}).as_chat()
        server.engine.script = Script("<think>\nI look.\n</think>\n\nSo.")
        requested = await both(server)
        assert [block["type"] for block in requested["content"]] == ["thinking", "text"]


async def test_thinking_and_calls_reach_anthropics_own_client() -> None:
    async with serving(reasoning_parser="qwen3", tool_call_parser="hermes") as server:
        server.engine.script = Script(f"<think>\nI look.\n</think>\n\n{CALLS}", burst=3)
        requested: Any = {
            "model": "stub", "max_tokens": 1000, "messages": HI, "tools": [ADD, NOW],
            "thinking": {"type": "enabled", "budget_tokens": 50},
        }  # fmt: skip
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as api:
            whole = await api.messages.create(**requested)
            async with api.messages.stream(**requested) as stream:
                assembled = [event.thinking async for event in stream if event.type == "thinking"]
                streamed = await stream.get_final_message()
        kinds = ["thinking", "text", "tool_use", "tool_use"]
        assert [block.type for block in whole.content] == [block.type for block in streamed.content] == kinds
        assert "".join(assembled) == whole.content[0].thinking == streamed.content[0].thinking
        assert [block.input for block in streamed.content[2:]] == [block.input for block in whole.content[2:]]


BETWEEN = CALLS.replace("\n<tool_call>", "\nAnd now:<tool_call>") + "\nDone."


async def test_text_stays_at_its_position(hermes: Server) -> None:
    for burst in (1, 3, 1000):
        hermes.engine.script = Script(BETWEEN, burst=burst)
        content = (await both(hermes, tools=[ADD, NOW], max_tokens=1000))["content"]
        assert [block["type"] for block in content] == ["text", "tool_use", "text", "tool_use", "text"]
        assert [block["text"].strip() for block in content[::2]] == ["Let me see.", "And now:", "Done."]


async def test_output_schemas(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        await ask(server, **fields)
        assert '"a"' in str(server.engine.added[-1].params.grammar)


async def test_anthropics_server_tools_are_refused_and_tool_search_is_not_needed(hermes: Server) -> None:
    body = {"model": "stub", "max_tokens": 5, "messages": HI}
    for kind in ("web_search_20250305", "bash_20250124"):
        refused = await hermes.post("/v1/messages", {**body, "tools": [{"type": kind, "name": "x"}]})
        assert refused.status_code == 400
        assert kind in refused.json()["error"]["message"]
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    await ask(hermes, tools=[search, {**ADD, "defer_loading": True}])
    assert '"add"' in rendered(hermes)
    assert "tool_search" not in rendered(hermes)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/"}}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [IMAGE]}], "system": "s"}, "messages: images are not supported"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "only in messages of users and tools"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]}, "'video'"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "source"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
        ({"model": "claude"}, "claude"),
        ({"messages": [{"role": "user", "content": "a b " * 300}]}, "prompt is too long"),
    ],
    ids=lambda case: str(case)[:50],
)
async def test_errors_have_anthropics_form(server: Server, fields: dict[str, Any], what: str) -> None:
    body = {"model": "stub", "max_tokens": 5, "messages": HI, **fields}
    response = await server.post("/v1/messages", body, headers={"x-request-id": "mine"})
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    error = response.json()
    assert what in error["error"].pop("message")
    kind = "not_found_error" if "model" in fields else "invalid_request_error"
    assert response.status_code == (404 if "model" in fields else 400)
    assert error == {"type": "error", "error": {"type": kind}, "request_id": "mine"}


async def test_middleware_errors_have_the_same_form() -> None:
    options: dict[str, Any] = {"api_key": ["secret"], "rate_limit": 2, "max_body_mib": 0.01, "max_queued_requests": 1}
    async with serving(max_num_seqs=1, **options) as server:
        key, body = {"x-api-key": "secret"}, {"model": "stub", "max_tokens": 5, "messages": HI}

        async def refused(**about: Any) -> tuple[int, str]:
            about = {"headers": key, "json": body, "url": "/v1/messages", "method": "POST", **about}
            response = await server.http.request(**about)
            error = response.json()
            assert error["type"] == "error"
            assert error["request_id"] == response.headers["request-id"]
            return response.status_code, error["error"]["type"]

        assert await refused(headers={}) == (401, "authentication_error")
        assert await refused(url="/v1/messages/batches") == (404, "not_found_error")
        assert await refused(url="/v1/models/x", method="GET", headers={**key, "anthropic-version": "2023-06-01"}) == (
            404,
            "not_found_error",
        )
        assert await refused(url="/v1/messages/count_tokens", method="GET") == (405, "invalid_request_error")
        large = {**body, "system": "x" * 20_000}
        assert await refused(json=large, url="/v1/messages/count_tokens") == (413, "request_too_large")
        for _ in range(2):
            assert (await server.post("/v1/messages", body, headers=key)).status_code == 200
        assert await refused() == (429, "rate_limit_error")
    async with serving(max_num_seqs=1, max_queued_requests=1) as server:
        key = {}
        server.engine.script = Script(gate=asyncio.Event())
        waiting = [asyncio.create_task(server.post("/v1/messages", body)) for _ in range(2)]
        await server.settle(lambda: len(server.engine.added) == 2)
        assert await refused() == (529, "overloaded_error")
        assert (await server.post("/v1/chat/completions", {"messages": HI})).status_code == 503
        server.engine.script.gate.set()
        assert [(await task).status_code for task in waiting] == [200, 200]
        server.service.phase = Phase.LOADING
        assert await refused() == (503, "api_error")
        metrics = (await server.http.get("/metrics")).text
        assert 'weft_requests_total{endpoint="/v1/messages",status="529"} 1.0' in metrics


async def test_a_broken_stream_reports_an_error(server: Server) -> None:
    server.engine.script = Script("hello world", stop_after=1)
    body = {"model": "stub", "max_tokens": 50, "messages": HI, "stream": True}
    task = asyncio.create_task(server.post("/v1/messages", body))
    await server.settle(lambda: bool(server.service.open) and bool(server.engine.added))
    choice = next(iter(server.service.open))._generation.choices  # type: ignore[attr-defined]
    await server.settle(lambda: bool(choice) and choice[0].num_tokens > 0)
    server.engine.give_up("the engine ended")
    text = (await task).text
    assert "message_stop" not in text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')


async def test_tokens_are_counted_as_they_are_used(hermes: Server) -> None:
    fields: dict[str, Any] = {"system": "be kind", "tools": [ADD, NOW], "thinking": {"type": "adaptive"}}
    counted = await hermes.post("/v1/messages/count_tokens", {"model": "stub", "messages": HI, **fields})
    assert counted.json() == {"input_tokens": (await ask(hermes, **fields))["usage"]["input_tokens"]}
    refused = await hermes.post("/v1/messages/count_tokens", {"model": "nobody", "messages": HI})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


async def test_models_in_anthropics_form_for_its_clients(server: Server) -> None:
    requested = {"anthropic-version": "2023-06-01"}
    models = (await server.http.get("/v1/models", headers=requested)).json()
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "stub", "stub")
    (model,) = models["data"]
    assert model == (await server.http.get("/v1/models/stub", headers=requested)).json()
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "stub", 512)
    assert (await server.http.get("/v1/models")).json()["object"] == "list"
