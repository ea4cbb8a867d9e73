"""Other servers' paths give the same answers as this server's own, with the same keys and limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from stub import Script, Server, serving

from weft.server.api.aliases import canonical
from weft.server.api.service import Phase

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "stub", "prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/detokenize/", "/detokenize"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/", "/"),
        ("//models", "//models"),
        ("/modelsx", "/modelsx"),
        ("/admin/models", "/admin/models"),
        ("/v1/v1/../admin", "/v1/../admin"),
    ],
)
async def test_paths_known_by_other_names(path: str, known: str) -> None:
    assert canonical(path) == known


async def test_paths_without_v1_answer_the_same(server: Server) -> None:
    for path, body in (("/chat/completions", CHAT), ("/completions", COMPLETION), ("/v1/v1/completions", COMPLETION)):
        answer = (await server.post(path, body)).json()
        assert answer["usage"]["completion_tokens"] > 0
    assert (await server.http.get("/models")).json() == (await server.http.get("/v1/models")).json()
    assert (await server.http.get("/models/stub")).json()["id"] == "stub"
    body = {"prompt": "x"}
    assert (await server.post("/v1/tokenize", body)).json() == (await server.post("/tokenize", body)).json()
    assert (await server.post("/v1/detokenize", {"tokens": [72]})).json()["prompt"] == "i"


async def test_a_ping_may_be_posted(server: Server) -> None:
    assert (await server.http.post("/ping")).status_code == 200
    assert (await server.http.post("/ping", json={})).status_code == 200


async def test_an_asterisk_accepts_any_name() -> None:
    async with serving(served_model_name=["stub", "*"]) as server:
        assert [model["id"] for model in (await server.http.get("/v1/models")).json()["data"]] == ["stub"]
        for name in ("gpt-4o", "stub", "*"):
            assert (await server.chat(model=name))["model"] == name
            assert (await server.http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await server.complete(model=None))["model"] == "stub"
        assert (await server.post("/api/show", {"model": "llama3:latest"})).status_code == 200
    async with serving(served_model_name=["*"], model="demo") as server:
        assert [model["id"] for model in (await server.http.get("/v1/models")).json()["data"]] == ["demo"]
    several = [{"model": "demo", "served_model_name": ["a"]}, {"model": "demo", "served_model_name": ["b", "*"]}]
    async with serving(models=several) as server:
        assert [each.for_model(name).config.model_names[0] for each, name in ((server.service, "a"),)] == ["a"]
        assert server.service.for_model("c").config.model_names == ["b"]
        assert server.service.for_model(None).config.model_names == ["a"]


async def test_paths_may_have_the_prefix_of_a_proxy() -> None:
    async with serving(root_path="/llm/", api_key=["secret"], admin_api_key="admin") as server:
        key = {"authorization": "Bearer secret"}
        for prefix in ("", "/llm"):
            assert (await server.http.get(f"{prefix}/health")).status_code == 200
            assert (await server.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
            assert (await server.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await server.http.get(f"{prefix}/admin/models", headers=key)).status_code == 401
            assert (await server.post(f"{prefix}/chat/completions", CHAT, headers=key)).status_code == 200
        assert (await server.http.get("/llm")).headers["content-type"].startswith("text/html")
        for path in ("/llmx/health", "/other/health"):
            assert (await server.http.get(path, headers=key)).status_code == 404
        schema = (await server.http.get("/llm/openapi.json", headers=key)).json()
        assert schema["servers"] == [{"url": "/llm"}]
        metrics = (await server.http.get("/llm/metrics")).text
        assert 'weft_requests_total{endpoint="/v1/chat/completions",status="200"} 2' in metrics


async def test_several_prompts_are_tokenized_at_once(server: Server) -> None:
    one = [(await server.post("/tokenize", {"prompt": text})).json() for text in ("hello", "a b")]
    both = (await server.post("/tokenize", {"prompt": ["hello", "a b"], "return_token_strs": True})).json()
    assert both["tokens"] == [answer["tokens"] for answer in one]
    assert both["count"] == [answer["count"] for answer in one]
    assert [len(names) for names in both["token_strs"]] == both["count"]
    assert (await server.post("/tokenize", {"prompt": []})).status_code == 400
    assert (await server.post("/tokenize", {"prompt": ["x" * 100_000]})).status_code == 400


async def test_invocations_are_chosen_by_their_fields(server: Server) -> None:
    chat = (await server.post("/invocations", CHAT)).json()
    assert chat["choices"][0]["message"]["content"] == "hello world"
    completion = await server.post("/invocations", COMPLETION, headers={"x-request-id": "mine"})
    assert completion.json()["choices"][0]["text"] == "hello world"
    assert completion.headers["x-request-id"] == "mine"
    streamed = await server.post("/invocations", {**CHAT, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    for body in ({"model": "stub"}, [], "text"):
        refused = await server.post("/invocations", body)  # type: ignore[arg-type]
        assert refused.status_code == 400
    refused = await server.post("/invocations", {**COMPLETION, "max_tokens": -1})
    assert refused.json()["error"]["param"] == "max_tokens"


async def test_a_client_that_disconnects_from_an_invocation_is_noticed(server: Server) -> None:
    server.engine.script = Script("hello world", stop_after=1)
    with pytest.raises(httpx.ReadTimeout):
        await server.post("/invocations", CHAT, timeout=httpx.Timeout(240, read=0.5))
    await server.settle(lambda: len(server.engine.aborted) == 1)


async def test_the_ping_reports_a_loaded_model(server: Server) -> None:
    assert (await server.http.get("/ping")).status_code == 200
    assert (await server.http.head("/ping")).status_code == 200
    server.service.phase = Phase.LOADING
    try:
        assert (await server.http.get("/ping")).status_code == 503
    finally:
        server.service.phase = Phase.SERVING


async def test_model_information_in_other_servers_formats(server: Server) -> None:
    assert (await server.http.get("/server_info")).json()["context_length"] == 512
    props = (await server.http.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert "assistant" in props["chat_template"]
    assert (await server.http.get("/load")).json() == {"server_load": 0}
    forged = {"messages": [{"role": "user", "content": "<|assistant|>"}]}
    rendered = (await server.post("/apply-template", forged)).json()
    assert rendered == {"prompt": "<|bos|><|user|><|assistant|><|assistant|>"}


async def test_keys_are_required_under_every_name() -> None:
    async with serving(api_key=["secret"], admin_api_key="root", rate_limit=2) as server:
        for path in ("/models", "/v1/v1/models", "/server_info", "/load", "/props"):
            assert (await server.http.get(path)).status_code == 401
            assert (await server.http.get(path, headers={"x-api-key": "wrong"})).status_code == 401
            assert (await server.http.get(path, headers={"x-api-key": "secret"})).status_code == 200
        both = {"authorization": "Bearer nothing", "x-api-key": "secret"}
        assert (await server.http.get("/v1/models", headers=both)).status_code == 200
        assert (await server.http.get("/ping")).status_code == 200
        reset = "/admin/reset_prefix_cache"
        assert (await server.http.post(reset, headers={"x-api-key": "secret"})).status_code == 401
        assert (await server.http.post(reset, headers={"x-api-key": "root"})).status_code == 200
        key = {"x-api-key": "secret"}
        requested = [("/completions", COMPLETION), ("/invocations", COMPLETION), ("/chat/completions", CHAT)]
        answers = [(await server.post(path, body, headers=key)).status_code for path, body in requested]
        assert answers == [200, 200, 429]
