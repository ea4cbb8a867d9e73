"""Ollama's API: the requests that reach the engine, the answers in Ollama's form, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from stub import HIDDEN, MAX_MODEL_LEN, Script, Server, serving

from weft.server.api.ollama_protocol import GenerateBody, Message, OllamaChatBody, Options
from weft.server.api.other_fields import REFUSED

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
)


async def chat(server: Server, **body: Any) -> httpx.Response:
    return await server.post("/api/chat", {"model": "stub", "messages": HELLO, **body})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat_streams_lines_by_default(server: Server) -> None:
    *parts, last = lines(await chat(server))
    assert "".join(part["message"]["content"] for part in parts) == "hello world"
    assert all(part["message"]["role"] == "assistant" and part["done"] is False for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["prompt_eval_count"] == len(server.engine.prompt())
    assert last["eval_count"] > 0
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    whole = (await chat(server, stream=False)).json()
    assert whole["message"] == {"role": "assistant", "content": "hello world"}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("stub", True, "stop")


async def test_options_reach_the_engine_and_ollamas_defaults_hold(server: Server) -> None:
    await chat(server, stream=False)
    params = server.engine.added[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.9, 0.0)
    assert params.max_tokens == MAX_MODEL_LEN - len(server.engine.prompt())
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.3}
    given |= {"num_predict": 2, "num_ctx": 64, "presence_penalty": 0.2, "frequency_penalty": 0.4, "repeat_last_n": -1}
    answer = (await chat(server, stream=False, options=given)).json()
    params = server.engine.added[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.6, 0.1, 3)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.3, 0.2, 0.4)
    assert (params.max_tokens, answer["done_reason"], answer["eval_count"]) == (2, "length", 2)
    await chat(server, stream=False, options={"repeat_penalty": 1.3, "repeat_last_n": 0, "num_predict": 10**6})
    params = server.engine.added[-1].params
    assert params.repetition_penalty == 1.0
    assert params.max_tokens == MAX_MODEL_LEN - len(server.engine.prompt())  # the context ends an answer
    assert lines(await chat(server, options={"stop": ["o w"]}))[-1]["done_reason"] == "stop"
    assert (await chat(server, stream=False, options={"stop": ["o w"]})).json()["message"]["content"] == "hell"


REFUSED_OPTIONS: dict[str, Any] = {
    "num_batch": 512, "num_gpu": 1, "main_gpu": 0, "num_thread": 8, "use_mmap": True, "use_mlock": True, "numa": True,
    "low_vram": True, "f16_kv": True, "vocab_only": True, "logits_all": True, "embedding_only": True, "num_keep": 5,
    "tfs_z": 0.5, "typical_p": 0.7, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "penalize_newline": False,
    "num_ctx": MAX_MODEL_LEN + 1, "num_predict": 0, "temperature": "hot", "top_k": 0.5, "stop": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
async def test_an_option_that_has_no_effect_here_is_refused_by_name(server: Server, name: str) -> None:
    response = await chat(server, options={name: REFUSED_OPTIONS[name]})
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert f"options.{name}" in response.json()["error"]
    assert not server.engine.added


async def test_a_window_of_penalties_is_refused_only_if_there_are_penalties(server: Server) -> None:
    assert (await chat(server, stream=False, options={"repeat_last_n": 64})).status_code == 200
    refused = await chat(server, options={"repeat_last_n": 64, "repeat_penalty": 1.1})
    assert refused.status_code == 400
    assert "options.repeat_last_n" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": HELLO, "format": "yaml"}, "format"),
        ("chat", {"messages": HELLO, "format": {"uniqueItems": True}}, "format: Unimplemented"),
        ("chat", {"messages": HELLO, "keep_alive": 0}, "keep_alive"),
        ("chat", {"messages": HELLO, "keep_alive": "soon"}, "keep_alive"),
        ("chat", {"messages": HELLO, "think": True}, "think"),
        ("chat", {"messages": HELLO, "think": "deeply"}, "think"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ("chat", {"messages": HELLO, "truncate": True}, "truncate"),
        ("chat", {"messages": HELLO, "shift": True}, "shift"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("generate", {"prompt": "x", "raw": True, "think": True}, "think"),
        ("generate", {"prompt": "x", "width": 64}, "width"),
        ("chat", {"messages": HELLO, "temperature": 0.5}, "use options.temperature"),
        ("chat", {"messages": HELLO, "num_predict": 5}, "use options.num_predict"),
        ("chat", {"messages": HELLO, "max_tokens": 5}, "use options.num_predict"),
        ("chat", {"messages": HELLO, "response_format": {"type": "json_object"}}, "use format"),
        ("chat", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ("chat", {"messages": HELLO, "prompt": "x"}, "use /api/generate"),
        ("generate", {"prompt": "x", "messages": HELLO}, "use /api/chat"),
        ("show", {}, "model"),
        ("embed", {"input": [1]}, "input"),
        ("embed", {"input": "x", "options": {"num_ctx": MAX_MODEL_LEN + 1}}, "options.num_ctx"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], name: str
) -> None:
    response = await server.post(f"/api/{path}", {**({} if path == "show" else {"model": "stub"}), **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert isinstance(error, str)
    assert name.removeprefix("messages[0].") in error
    assert "response_format:" not in error
    assert not server.engine.added


async def test_unknown_fields_are_reported_wherever_they_are(server: Server) -> None:
    response = await chat(server, stream=False, unheard=1, options={"unheard": 2})
    assert response.headers["x-weft-ignored-fields"] == "options.unheard, unheard"
    async with serving(strict_fields=True) as strict:
        refused = await chat(strict, options={"unheard": 2})
        assert refused.status_code == 400
        assert "options.unheard" in refused.json()["error"]


async def test_the_fields_of_the_client_are_known() -> None:
    """The names of the Python client 0.6.3 and of the documentation."""

    def inside(place: str) -> set[str]:
        return {name.removeprefix(place) for name in REFUSED if name.startswith(place)}

    options = """numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock
        embedding_only num_thread num_keep seed num_predict top_k top_p min_p tfs_z typical_p repeat_last_n temperature
        repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop"""
    assert set(options.split()) == Options.attributes.keys() | inside("options.")
    both = "model stream options format keep_alive think logprobs top_logprobs truncate shift "
    assert set((both + "messages tools").split()) <= OllamaChatBody.attributes.keys() | REFUSED.keys()
    own = "prompt suffix system template context raw images width height steps"
    assert set((both + own).split()) <= GenerateBody.attributes.keys() | REFUSED.keys()
    names = "role content thinking images tool_calls tool_name tool_call_id name"
    others = {"prefix"}  # of chat completions
    assert set(names.split()) | others == Message.attributes.keys() | inside("messages[].")


async def test_calls_come_whole_with_their_arguments_as_objects(hermes: Server) -> None:
    hermes.engine.script = Script(CALLS)
    expected = [{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo")]
    whole = (await chat(hermes, tools=[WEATHER], stream=False)).json()
    assert [call["function"] for call in whole["message"]["tool_calls"]] == expected
    assert whole["done_reason"] == "stop"
    parts = lines(await chat(hermes, tools=[WEATHER]))
    assert [call["function"] for part in parts for call in part["message"].get("tool_calls", ())] == expected
    assert "".join(part["message"]["content"] for part in parts) == ""


async def test_results_find_their_calls_by_name_and_order() -> None:
    call = {"function": {"name": "a", "arguments": {"x": 1}}}
    other = {"function": {"name": "b", "arguments": {}}}
    body = OllamaChatBody.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other]},
                {"role": "tool", "content": "2", "tool_name": "b"},
                {"role": "tool", "content": "1"},
            ],
        }
    )
    _, requested, second, first = body.as_chat("m")["messages"]
    assert requested["content"] is None
    assert requested["reasoning_content"] == "hm"
    assert requested["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x": 1}'}
    ids = [each["id"] for each in requested["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 for each in ids)
    assert (second["tool_call_id"], second["name"]) == (ids[1], "b")
    assert (first["tool_call_id"], first["name"]) == (ids[0], "a")


async def test_formats_become_grammars(server: Server) -> None:
    server.engine.script = Script('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await chat(server, format=schema, stream=False)
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    assert '"a"' in grammar
    await chat(server, format="json", stream=False)
    assert server.engine.added[-1].params.grammar is not None
    await chat(server, format="", stream=False)
    assert server.engine.added[-1].params.grammar is None


async def test_a_prompt_goes_through_the_template_unless_it_is_raw(server: Server) -> None:
    async def prompt(**body: Any) -> str:
        answer = (await server.post("/api/generate", {"model": "stub", "stream": False, **body})).json()
        assert answer["response"] == "hello world"
        assert "message" not in answer
        return server.engine.tokenizer._decode(server.engine.prompt())

    assert await prompt(prompt="hi", system="be") == "<|bos|><|system|>be<|user|>hi<|assistant|>"
    assert await prompt(prompt="hi", raw=True) == "hi"
    parts = lines(await server.post("/api/generate", {"model": "stub", "prompt": "hi", "raw": True}))
    assert "".join(part["response"] for part in parts) == "hello world"


async def test_thinking_is_a_field_of_its_own() -> None:
    async with serving(reasoning_parser="qwen3") as server:
        server.engine.script = Script("<think>hm</think>hello")
        whole = (await chat(server, think=True, stream=False)).json()["message"]
        assert (whole["thinking"], whole["content"]) == ("hm", "hello")
        parts = [part["message"] for part in lines(await chat(server))]
        assert "".join(part.get("thinking", "") for part in parts) == "hm"
        assert "".join(part["content"] for part in parts) == "hello"
        written = (await server.post("/api/generate", {"model": "stub", "prompt": "x", "stream": False})).json()
        assert (written["thinking"], written["response"]) == ("hm", "hello")
        assert "thinking" in (await server.post("/api/show", {"model": "stub"})).json()["capabilities"]


async def test_logprobs_name_tokens_and_alternatives(server: Server) -> None:
    whole = (await chat(server, logprobs=True, top_logprobs=2, stream=False)).json()
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert whole["logprobs"][0]["token"] == "hello"
    assert [len(entry["top_logprobs"]) for entry in whole["logprobs"]] == [2] * whole["eval_count"]
    parts = lines(await chat(server, logprobs=True))
    assert sum(len(part.get("logprobs", ())) for part in parts) == whole["eval_count"]


async def test_without_work_the_model_is_only_loaded(server: Server) -> None:
    (answer,) = lines(await server.post("/api/chat", {"model": "stub", "messages": []}))
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    answer = (await server.post("/api/generate", {"model": "stub", "stream": False, "keep_alive": "5m"})).json()
    assert (answer["response"], answer["done_reason"]) == ("", "load")
    (answer,) = lines(await server.post("/api/generate", {"model": "stub"}))
    assert answer["done"]
    assert not server.engine.added


async def test_models_are_listed_and_described(server: Server) -> None:
    (model,) = (await server.http.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "stub"
    assert len(model["digest"]) == 64
    assert (await server.http.get("/api/ps")).json()["models"][0]["context_length"] == MAX_MODEL_LEN
    shown = (await server.post("/api/show", {"name": "stub:latest"})).json()
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == MAX_MODEL_LEN
    assert "completion" in shown["capabilities"]
    version = (await server.http.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # clients refuse older ones


async def test_the_default_tag_is_part_of_no_name(server: Server) -> None:
    answer = (await chat(server, model="stub:latest", stream=False)).json()
    assert answer["model"] == "stub:latest"
    for path, body in (("chat", {"messages": HELLO}), ("generate", {}), ("show", {}), ("embed", {"input": "x"})):
        response = await server.post(f"/api/{path}", {"model": "stub:7b", **body})
        assert response.status_code == 404
        assert "stub:7b" in response.json()["error"]


async def test_embeddings_have_both_forms(server: Server) -> None:
    answer = (await server.post("/api/embed", {"model": "stub", "input": ["a", "b"], "dimensions": 4})).json()
    assert [len(vector) for vector in answer["embeddings"]] == [4, 4]
    assert answer["prompt_eval_count"] == 2
    one = (await server.post("/api/embeddings", {"model": "stub", "prompt": "a"})).json()
    assert len(one["embedding"]) == HIDDEN
    assert (await server.post("/api/embed", {"model": "stub", "input": []})).json()["embeddings"] == []


async def test_long_inputs_of_embeddings_are_truncated_by_default(server: Server) -> None:
    long = "x " * 2 * MAX_MODEL_LEN
    assert (await server.post("/api/embed", {"model": "stub", "input": long})).status_code == 200
    assert len(server.engine.prompt()) <= MAX_MODEL_LEN
    assert (await server.post("/api/embed", {"model": "stub", "input": long, "truncate": False})).status_code == 400


async def test_json_needs_no_content_type_unless_a_browser_sends_it(server: Server) -> None:
    body = json.dumps({"model": "stub", "messages": HELLO, "stream": False}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await server.http.post("/api/chat", content=body, headers=form)).status_code == 200
    assert (await server.http.post("/api/chat", content=body)).status_code == 200
    for header in ({"origin": server.url}, {"sec-fetch-site": "same-origin"}):
        response = await server.http.post("/api/chat", content=body, headers=form | header)
        assert response.status_code == 400
        assert "Content-Type" in response.json()["error"]


async def test_errors_are_texts(server: Server) -> None:
    assert (await server.http.get("/api/nothing")).json() == {"error": "There is nothing at this path."}
    assert (await server.http.get("/api/chat")).json().keys() == {"error"}
    bad = await server.http.post("/api/chat", content=b"{", headers={"content-type": "application/json"})
    assert bad.status_code == 400
    assert "not valid JSON" in bad.json()["error"]


async def test_an_error_ends_a_stream_as_a_line() -> None:
    async with serving() as server:
        server.engine.script = Script(stop_after=1)
        body = {"model": "stub", "messages": HELLO}
        async with server.http.stream("POST", "/api/chat", json=body) as response:
            iterator = response.aiter_lines()
            await anext(iterator)
            server.engine.die()
            last = [line async for line in iterator][-1]
    assert json.loads(last).keys() == {"error"}


async def test_keys_limits_and_request_ids_are_those_of_every_endpoint() -> None:
    async with serving(api_key=["secret"], rate_limit=2) as server:
        assert (await chat(server)).status_code == 401
        assert (await server.http.get("/api/tags")).status_code == 401
        key = {"authorization": "Bearer secret", "x-request-id": "abc"}
        for status in (200, 200, 429):
            response = await server.post("/api/chat", {"model": "stub", "messages": HELLO}, headers=key)
            assert response.status_code == status
            assert response.headers["x-request-id"] == "abc"
        assert response.json().keys() == {"error"}
        metrics = (await server.http.get("/metrics")).text
        assert 'weft_requests_total{endpoint="/api/chat",status="200"} 2' in metrics


async def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    server.engine.script = Script("hello " * 50, delay=0.01)
    async with server.http.stream("POST", "/api/chat", json={"model": "stub", "messages": HELLO}) as response:
        await anext(response.aiter_lines())
    await server.settle(lambda: bool(server.engine.aborted))
