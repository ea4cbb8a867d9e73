"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest
from stub import Script, Server, serving

from weft.server.api import model_text
from weft.server.api.choices import fingerprint

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chunks_of(server: Server, **body: Any) -> list[Any]:
    messages = [{"role": "user", "content": "hi"}]
    response = await server.post("/v1/chat/completions", {"messages": messages, "stream": True, **body})
    assert response.status_code == 200, response.text
    lines = response.text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_message_usage_and_finish_reason(server: Server) -> None:
    body = await server.chat()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_all_answers_and_chunks_of_an_engine_have_one_fingerprint(server: Server) -> None:
    chunks = await chunks_of(server)
    answers = [await server.chat(), await server.complete(), *chunks]
    (found,) = {answer["system_fingerprint"] for answer in answers}
    ready = server.service.loaded.ready
    assert found == fingerprint(ready)
    assert found.startswith("fp_")
    assert found != fingerprint(msgspec.structs.replace(ready, dtype="float16"))


async def test_the_template_is_rendered_with_a_single_bos(server: Server) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    await server.chat(messages=messages)
    text = "<|bos|><|system|>be kind<|user|>hello<|assistant|>"
    assert server.engine.prompt() == server.engine.tokenizer.encode(text, add_special_tokens=False)


async def test_text_parts_are_joined_and_null_content_is_allowed_with_tool_calls(server: Server) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "x"},
    ]
    await server.chat(messages=messages)
    text = "<|bos|><|user|>hel\nlo<|assistant|><|user|>x<|assistant|>"
    assert server.engine.prompt() == server.engine.tokenizer.encode(text, add_special_tokens=False)


async def prompt_of(server: Server, **body: Any) -> str:
    await server.chat(**body)
    return server.engine.tokenizer._hf.decode(server.engine.prompt())


async def test_fields_of_the_template(server: Server) -> None:
    hf = server.engine.tokenizer._hf
    own = hf.chat_template
    hf.chat_template = own + "{% if documents %}[{{ documents[0].text }}]{% endif %}{{ mood }}"
    try:
        assert await prompt_of(server) == "<|bos|><|user|>hi<|assistant|>"
        assert await prompt_of(server, add_generation_prompt=False) == "<|bos|><|user|>hi"
        assert await prompt_of(server, documents=[{"text": "fact"}]) == "<|bos|><|user|>hi<|assistant|>[fact]"
        assert await prompt_of(server, chat_template_kwargs={"mood": "glad"}) == "<|bos|><|user|>hi<|assistant|>glad"
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
        fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        assert await prompt_of(server, **fields) == "<|bos|><|user|>hi<|assistant|>I say"
        counted = await server.post("/tokenize", {**fields, "chat_template_kwargs": {"mood": "glad"}})
        assert counted.json()["tokens"] == server.engine.prompt()
    finally:
        hf.chat_template = own


async def test_special_tokens_in_addition_to_the_templates() -> None:
    async with serving(adds_bos=True) as server:
        assert await prompt_of(server, add_special_tokens=True) == "<|bos|><|bos|><|user|>hi<|assistant|>"


async def test_developer_messages_are_system_messages_if_the_template_has_no_other(server: Server) -> None:
    messages = [{"role": "developer", "content": "be kind"}]
    assert await prompt_of(server, messages=messages) == "<|bos|><|system|>be kind<|assistant|>"


@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_echo_repeats_the_assistants_prefix(server: Server, role: str) -> None:
    fields = {"messages": [{"role": role, "content": "I say "}], "echo": True, "add_generation_prompt": False}
    expected = "I say hello world" if role == "assistant" else "hello world"
    assert (await server.chat(**fields))["choices"][0]["message"]["content"] == expected
    chunks = await chunks_of(server, **fields)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected


async def test_a_template_has_its_own_time_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(model_text, "RENDER_SECONDS", 0.05)
    monkeypatch.setattr(server.engine.tokenizer, "render_chat", lambda *_, **__: "late" if released.wait(240) else "")
    response = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    released.set()
    assert response.status_code == 400
    assert "chat template took longer" in response.json()["error"]["message"]


async def test_the_default_limit_is_the_remaining_context(server: Server) -> None:
    await server.chat()
    assert server.engine.added[-1].params.max_tokens == 512 - len(server.engine.prompt())
    await server.chat(max_tokens=5, max_completion_tokens=7)
    assert server.engine.added[-1].params.max_tokens == 7


async def test_stream_starts_with_the_role_and_repeats_no_byte(server: Server) -> None:
    server.engine.script = Script("a 😀 b")
    first, *rest = await chunks_of(server)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest) == "a 😀 b"
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]


async def test_each_choice_of_a_stream_gets_its_role_once(server: Server) -> None:
    server.engine.script = Script("hello", vary=True)
    texts = {0: "", 1: "", 2: ""}
    roles = []
    for chunk in await chunks_of(server, n=3):
        (choice,) = chunk["choices"]
        if "role" in choice["delta"]:
            roles.append(choice["index"])
        texts[choice["index"]] += choice["delta"]["content"]
    assert sorted(roles) == [0, 1, 2]
    assert len(set(texts.values())) == 3


async def test_stream_usage_comes_last(server: Server) -> None:
    *chunks, last = await chunks_of(server, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_logprobs_content(server: Server) -> None:
    server.engine.script = Script("é")
    body = await server.chat(logprobs=True, top_logprobs=2)
    first, end = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "é"
    assert first["bytes"] == list("é".encode())
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.0]
    assert first["top_logprobs"][1] == {key: first[key] for key in ("token", "logprob", "bytes")}
    assert end["token"] == "<|eos|>"
    body = await server.chat(logprobs=True)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    body = await server.chat(logprobs=True, top_logprobs=1)
    (best,) = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert best["logprob"] == -0.5  # not the sampled token, which is the second best


async def test_parts_of_characters_keep_their_bytes(server: Server) -> None:
    server.engine.script = Script("你")
    body = await server.chat(logprobs=True)
    *parts, _ = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for part in parts for byte in part["bytes"]).decode() == "你"
    assert parts[0]["token"] == "bytes:\\xe4"


async def test_token_ids_and_prompt_logprobs_extensions(server: Server) -> None:
    body = await server.chat(return_token_ids=True, prompt_logprobs=0)
    assert body["prompt_token_ids"] == server.engine.prompt()
    assert body["choices"][0]["token_ids"][-1] == server.engine.eos
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    without = await server.chat()
    assert without["prompt_logprobs"] is without["prompt_token_ids"] is without["choices"][0]["token_ids"] is None
    first, second, *_ = await chunks_of(server, return_token_ids=True)
    assert first["prompt_token_ids"] == server.engine.prompt()
    assert len(second["choices"][0]["token_ids"]) == 1


async def test_tools_may_be_absent_in_all_forms(server: Server) -> None:
    for extra in (
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
    ):
        await server.chat(**extra)
