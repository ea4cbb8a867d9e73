"""Which part of a prompt is retained: the request in each API format, the engine's message in tokens, and the reported
usage."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from chat_templates import TEMPLATES
from stub import Script, Server
from vocabularies import byte_level, wrapped

from weft.server.api.protocol import ChatBody
from weft.server.api.turn import marks_of, retention_of
from weft.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
LONG: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TALK = [
    {"role": "system", "content": "Be very brief."},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
]


def kept(server: Server) -> list[tuple[str, float]]:
    """The last retention sent to the engine: the end of its text, and seconds."""
    decode = server.engine.tokenizer._backend.decode
    reported = [(retention.tokens, retention.seconds) for retention in server.engine.added[-1].retention]
    return [(decode(server.engine.prompt()[:n], skip_special_tokens=False)[-30:], seconds) for n, seconds in reported]


def marked(i: int, mark: dict[str, Any], *, part: bool = True) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [dict(message) for message in TALK]
    if part:
        talk[i]["content"] = [{"type": "text", "text": talk[i]["content"], **mark}]
    else:
        talk[i] |= mark
    return talk


async def chat(server: Server, **fields: Any) -> Any:
    response = await server.post("/v1/chat/completions", {"model": "stub", "messages": TALK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_nothing_is_retained_without_a_request(server: Server) -> None:
    await chat(server)
    assert server.engine.added[-1].retention == ()


async def test_the_engine_of_a_recurrent_model_saves_a_state_after_tools_and_system_messages(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = server.service.loaded
    ready = msgspec.structs.replace(loaded.ready, recurrent=True)
    monkeypatch.setattr(server.service, "last_loaded", loaded._replace(ready=ready))
    await chat(server)
    ((text, seconds),) = kept(server)
    assert "Be very brief." in text
    assert "first question" not in text
    assert seconds == 0
    await chat(server, messages=marked(0, SHORT))
    assert [seconds for _, seconds in kept(server)] == [300]


@pytest.mark.parametrize("part", [True, False])
async def test_a_mark_in_chat_retains_everything_before_it(server: Server, part: bool) -> None:
    await chat(server, messages=marked(2, LONG, part=part))
    ((text, seconds),) = kept(server)
    assert text.endswith("first answer")
    assert seconds == 3600
    await chat(server, messages=marked(3, SHORT, part=part))
    (retention,) = server.engine.added[-1].retention
    assert (retention.tokens, retention.seconds) == (len(server.engine.prompt()), 300)


async def test_marks_of_messages_retain_their_blocks(server: Server) -> None:
    system, *talk = TALK
    body = {
        "model": "stub", "max_tokens": 5, "messages": [*talk[:2], marked(3, SHORT)[3]],
        "system": [{"type": "text", "text": system["content"], **LONG}],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, **LONG}],
        "metadata": {"user_id": "somebody"}, "tool_choice": {"type": "any"},
    }  # fmt: skip
    response = await server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    (head, hour), (whole, minutes) = kept(server)
    assert (hour, minutes) == (3600, 300)
    assert "first question" not in head
    assert "second question" in whole
    assert "cache_control" not in server.engine.tokenizer._backend.decode(server.engine.prompt())
    usage = response.json()["usage"]
    (until, all_tokens) = (retention.tokens for retention in server.engine.added[-1].retention)
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": all_tokens - until, "ephemeral_1h_input_tokens": until
    }  # fmt: skip
    assert usage["input_tokens"] == 0


@pytest.mark.parametrize(("cached", "hour", "minutes"), [(0, 60, 40), (30, 30, 40), (60, 0, 40), (80, 0, 20)])
async def test_usage_distinguishes_found_and_added_tokens(
    server: Server, cached: int, hour: int, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens of a prompt are retained, 60 of them for an hour."""
    from weft.engine.wire.messages import Retention
    from weft.server.api import turn

    monkeypatch.setattr(turn, "retention_of", lambda *_: (Retention(60, 3600.0), Retention(100, 300.0)))
    server.engine.script = Script(cached_tokens=cached)
    words = " ".join(str(i) for i in range(100))
    body = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": words}], **SHORT}
    usage = (await server.post("/v1/messages", body)).json()["usage"]
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour}
    assert usage["cache_creation_input_tokens"] == hour + minutes
    assert usage["cache_read_input_tokens"] == cached
    read = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert read == len(server.engine.prompt())
    server.engine.script = Script()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"prompt_cache_key": "k"}, 300),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_retention": "24h", "prompt_cache_key": "k"}, 86400),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions"])
async def test_openais_fields_retain_the_whole_prompt(
    server: Server, path: str, fields: dict[str, Any], seconds: float
) -> None:
    what = {"chat/completions": {"messages": TALK}, "responses": {"input": TALK}, "completions": {"prompt": "one two"}}
    response = await server.post(f"/v1/{path}", {"model": "stub", **what[path], **fields})
    assert response.status_code == 200, response.text
    (retention,) = server.engine.added[-1].retention
    assert (retention.tokens, retention.seconds) == (len(server.engine.prompt()), seconds)


async def test_marks_on_items_of_responses_count(server: Server) -> None:
    response = await server.post("/v1/responses", {"model": "stub", "input": marked(2, LONG)})
    assert response.status_code == 200, response.text
    ((text, seconds),) = kept(server)
    assert (text.endswith("first answer"), seconds) == (True, 3600)


async def test_a_user_field_retains_nothing(server: Server) -> None:
    body = {"model": "stub", "max_tokens": 5, "messages": TALK[1:], "metadata": {"user_id": "somebody"}}
    assert (await server.post("/v1/messages", body)).status_code == 200
    assert server.engine.added[-1].retention == ()


@pytest.mark.parametrize("mark", [{"type": "ephemeral", "ttl": "2h"}, {"type": "lasting"}, "ephemeral"])
async def test_an_invalid_mark_is_refused(server: Server, mark: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": mark}]}]
    for path in ("chat/completions", "messages"):
        response = await server.post(f"/v1/{path}", {"model": "stub", "max_tokens": 5, "messages": messages})
        assert response.status_code == 400, response.text
        assert "messages[0].content[0].cache_control" in response.text


async def test_a_tools_mark_changes_no_token(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    prompts = []
    for offered in (tool, {**tool, **SHORT}, {**tool, "function": {**tool["function"], **LONG}}):
        await chat(server, tools=[offered], tool_choice="none")
        prompts.append(server.engine.prompt())
        await chat(server, tools=[offered], tool_choice="required")
        prompts.append(server.engine.prompt())
    assert prompts[0] == prompts[2] == prompts[4]
    assert prompts[1] == prompts[3] == prompts[5]
    ((text, seconds),) = kept(server)
    assert "first question" not in text
    assert seconds == 3600


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_mark_is_found_in_the_output_of_every_template(name: str) -> None:
    """Exact to the token if the prompt contains the message unchanged; never beyond its end."""
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES[name]))
    for i, content in enumerate(("one ünd", "two 北京", "three")):
        turns = [
            ("user", "one ünd"),
            ("assistant", "two 北京"),
            ("user", "three"),
            ("assistant", "4"),
            ("user", "five"),
        ]
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
        messages[i] |= SHORT
        body = ChatBody.model_validate({"messages": messages})
        text = tokenizer.render_chat(body.messages, body.template_arguments())
        ids = tokenizer.encode(text, add_special_tokens=False)
        (retention,) = retention_of(marks_of(body), body, text, ids, tokenizer)
        beginning = tokenizer._backend.decode(ids[: retention.tokens], skip_special_tokens=False)
        assert beginning.endswith(content), (name, beginning)


async def test_bytes_of_tokens_add_up_to_the_text() -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES["thinking"]))
    text = "<|im_start|>user\nZürich 北京 'q' \n\n x<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert np.cumsum(tokenizer.byte_sizes(ids))[-1] == len(text.encode())


async def test_pages_are_prefetched_before_the_prompt_is_rendered(server: Server) -> None:
    engine = server.engine
    engine.fetched.clear()
    await chat(server, messages=TALK[:2], prompt_cache_key="k")
    first = engine.added[-1].names
    assert not engine.fetched, "there was no turn before"
    await chat(server, messages=TALK)
    assert engine.fetched[-1] == engine.added[-1].names == first[:1], "known by how it begins"
    await chat(server, messages=[{"role": "user", "content": "other"}, *TALK[2:]], prompt_cache_key="k")
    assert engine.fetched[-1][0] != first[0]
    assert engine.fetched[-1][1] == first[1], "known by its key"
    await chat(server, messages=TALK, cache_salt="mine")
    assert engine.fetched[-1][0] != first[0], "nobody else's"
    sent = len(engine.fetched)
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i}\nBe brief."} for i in range(2)]
    for nonce in system:
        body = {"model": "stub", "max_tokens": 5, "system": [nonce], "messages": TALK[1:]}
        assert (await server.post("/v1/messages", body)).status_code == 200
    assert engine.fetched[sent] == engine.fetched[sent + 1]
    assert (await server.post("/v1/responses", {"model": "stub", "input": TALK})).status_code == 200
    assert engine.fetched[-1] == first[:1]
