"""Models, probes, tokens, version, OpenAPI."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from stub import Server, serving

from weft import __version__
from weft.engine.wire.messages import EngineStats, Outputs, PlanStats, Profile, ToEngine
from weft.server.api import operations

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models(server: Server) -> None:
    body = (await server.http.get("/v1/models")).json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model == (await server.http.get("/v1/models/stub")).json()
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == ("stub", "model", "weft", 512)


async def test_several_served_names() -> None:
    async with serving(served_model_name=["a", "org/b"]) as server:
        body = (await server.http.get("/v1/models")).json()
        assert [(model["id"], model["root"]) for model in body["data"]] == [("a", "a"), ("org/b", "a")]
        assert (await server.http.get("/v1/models/org/b")).json()["id"] == "org/b"
        assert (await server.complete(model="org/b"))["model"] == "org/b"


async def test_health_ready_version(server: Server) -> None:
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.http.get("/ready")).status_code == 200
    assert (await server.http.get("/version")).json() == {"version": __version__}


async def test_ready_waits_until_other_processes_serve_with_an_engine() -> None:
    async with serving(engines=2) as server:

        async def code() -> Any:
            return (await server.http.get("/ready")).json().get("error", {}).get("code")

        server.service.unshared_engines |= {0, 1}
        assert await code() == "loading"
        assert (await server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
        server.service.engine_shared(1)
        assert await code() is None
        server.service.engine_died(1, restarting=True)
        assert await code() == "loading"
        server.service.engine_died(0, restarting=True)
        assert not server.service.unshared_engines


async def test_ready_reports_a_plan_in_preparation() -> None:
    async with serving() as server:

        async def reported(*plan: int) -> object:
            server.engine._deliver(Outputs(stats=EngineStats(plan=PlanStats(*plan))))
            figures = (await server.http.get("/metrics")).text
            left = plan[0] - plan[1] - plan[2]
            assert f'weft_plan_pipelines{{state="serving"}} {plan[1]}.0' in figures
            assert f'weft_plan_pipelines{{state="preparing"}} {left}.0' in figures
            assert f'weft_plan_pipelines{{state="left_out"}} {plan[2]}.0' in figures
            return (await server.http.get("/ready")).json()

        assert await reported(0, 0, 0) == {"status": "ready"}
        assert await reported(12, 3, 0) == {"status": "ready", "plan": "3 of 12 pipelines"}
        assert await reported(12, 11, 1) == {"status": "ready", "plan": "11 of 12 pipelines, 1 left out"}
        assert await reported(12, 12, 0) == {"status": "ready"}


async def test_ready_reports_a_plan_before_the_engines_first_message() -> None:
    async with serving() as server:
        ready = replace(server.engine.describe(), plan=PlanStats(3, 0, 0))
        server.service.metrics.engines[0].loaded("m", ready)
        assert (await server.http.get("/ready")).json()["plan"] == "0 of 3 pipelines"


async def test_metrics_by_get_and_head(server: Server) -> None:
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'weft_engine_up{engine="0"} 1.0' in response.text
    assert (await server.http.head("/metrics")).status_code == 200


async def test_tokenize_and_back(server: Server) -> None:
    text = "hello wörld 😀"
    body = (await server.post("/tokenize", {"model": "stub", "prompt": text, "return_token_strs": True})).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    assert body["token_strs"][0] == "hello"
    assert (await server.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": text, "content": text}
    named = {"model": "stub", "tokens": body["tokens"]}
    assert (await server.post("/detokenize", named)).json() == {"prompt": text}, "vLLM's answer"


async def test_tokenize_a_conversation(server: Server) -> None:
    messages = [{"role": "user", "content": "x"}]
    encode = server.engine.tokenizer.encode
    body = (await server.post("/tokenize", {"messages": messages})).json()
    assert body["tokens"] == encode("<|bos|><|user|>x<|assistant|>")
    body = (await server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json()
    assert body["tokens"] == encode("<|bos|><|user|>x")


async def test_special_tokens_are_added_to_prompts_once() -> None:
    async with serving(adds_bos=True) as server:
        bos = server.engine.tokenizer.encode("")[0]
        x = server.engine.tokenizer.encode("x", add_special_tokens=False)
        assert (await server.post("/tokenize", {"prompt": "x"})).json()["tokens"] == [bos, *x]
        no_special = {"prompt": "x", "add_special_tokens": False}
        assert (await server.post("/tokenize", no_special)).json()["tokens"] == x
        await server.complete(prompt="x")
        assert server.engine.prompt() == [bos, *x]
        await server.complete(prompt="x", add_special_tokens=False)
        assert server.engine.prompt() == x
        await server.complete(prompt="a" * 50 + "x", truncate_prompt_tokens=2)
        assert server.engine.prompt() == [bos, *x]
        await server.chat()
        assert server.engine.prompt().count(bos) == 1


async def test_tokenize_requires_one_input(server: Server) -> None:
    template = {"prompt": "x", "chat_template": "y"}
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, template):
        assert (await server.post("/tokenize", body)).status_code == 400
    assert (await server.post("/detokenize", {"tokens": ["a"]})).status_code == 400
    assert (await server.post("/detokenize", {"tokens": [10**6]})).status_code == 400


async def test_tokenizer_info(server: Server) -> None:
    body = (await server.http.get("/tokenizer_info")).json()
    assert (body["bos_token"], body["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert "<|assistant|>" in body["chat_template"]


async def test_a_profile_is_the_engines_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "PROFILE_POLL", 0.01)
    async with serving(admin_api_key="root") as server:
        admin = {"Authorization": "Bearer root"}
        requested: list[Profile] = []

        def engine_writes(message: ToEngine) -> None:
            assert isinstance(message, Profile)
            requested.append(message)
            Path(message.path).write_text('{"traceEvents": []}')

        monkeypatch.setattr(server.engine, "_send", engine_writes)
        response = await server.post("/admin/profile", {"seconds": 0.5}, headers=admin)
        assert response.json() == {"traceEvents": []}
        assert requested[0].seconds == 0.5
        assert not Path(requested[0].path).parent.exists()
        assert (await server.post("/admin/profile", {"seconds": 61}, headers=admin)).status_code == 400
        monkeypatch.setattr(server.engine, "_send", lambda _: server.engine.die())
        assert (await server.post("/admin/profile", {}, headers=admin)).status_code == 503
        monkeypatch.setattr(operations, "PROFILE_PATIENCE", 0.0)
        server.engine.dead = None
        monkeypatch.setattr(server.engine, "_send", lambda _: None)
        response = await server.post("/admin/profile", {"seconds": 0.01}, headers=admin)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")


async def test_a_profile_without_a_temporary_directory_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with serving(admin_api_key="root") as server:
        admin = {"Authorization": "Bearer root"}
        for directory in (str(tmp_path / "gone"), None):  # None: tempfile searches for one
            monkeypatch.setattr(tempfile, "tempdir", directory)
            monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
            response = await server.post("/admin/profile", {}, headers=admin)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (500, "no_temporary_directory")
            assert "TMPDIR" in error["message"]


async def test_every_reference_of_the_openapi_schema_resolves(server: Server) -> None:
    schema = (await server.http.get("/openapi.json")).json()
    references = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema)))
    assert references
    for reference in references:
        at = schema
        for key in reference.removeprefix("#/").split("/"):
            assert key in at, reference
            at = at[key]


async def test_openapi_names_every_endpoint_and_error(server: Server) -> None:
    schema = (await server.http.get("/openapi.json")).json()
    operations = {(method, path): op for path, item in schema["paths"].items() for method, op in item.items()}
    assert set(operations) == {
        ("post", "/v1/completions"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions/render"),
        ("post", "/v1/chat/completions/render"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/tokenizer_info"),
        ("get", "/health"),
        ("get", "/ready"),
        ("get", "/metrics"),
        ("get", "/version"),
        ("get", "/ping"),
        ("post", "/ping"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("post", "/v1/embeddings"),
        ("post", "/rerank"),
        ("post", "/v1/rerank"),
        ("post", "/v2/rerank"),
        ("post", "/score"),
        ("post", "/v1/score"),
        ("post", "/classify"),
        ("post", "/pooling"),
        ("post", "/v1/load_lora_adapter"),
        ("post", "/v1/unload_lora_adapter"),
        ("post", "/v1/responses"),
        ("post", "/v1/responses/input_tokens"),
        ("get", "/v1/responses/{id}"),
        ("delete", "/v1/responses/{id}"),
        ("post", "/v1/responses/{id}/cancel"),
        ("get", "/v1/responses/{id}/input_items"),
        ("post", "/v1/conversations"),
        ("get", "/v1/conversations/{id}"),
        ("post", "/v1/conversations/{id}"),
        ("delete", "/v1/conversations/{id}"),
        ("post", "/v1/conversations/{id}/items"),
        ("get", "/v1/conversations/{id}/items"),
        ("get", "/v1/conversations/{id}/items/{item}"),
        ("delete", "/v1/conversations/{id}/items/{item}"),
        ("post", "/invocations"),
        ("get", "/server_info"),
        ("get", "/load"),
        ("get", "/props"),
        ("post", "/apply-template"),
        ("get", "/admin/engines"),
        ("get", "/admin/models"),
        ("post", "/admin/sleep"),
        ("post", "/admin/wake"),
        ("post", "/admin/engines/restart"),
        ("post", "/admin/profile"),
        ("post", "/admin/reset_prefix_cache"),
        ("post", "/sleep"),
        ("post", "/wake_up"),
        ("get", "/is_sleeping"),
        ("post", "/pause"),
        ("post", "/resume"),
        ("get", "/is_paused"),
        ("post", "/reset_prefix_cache"),
        ("post", "/completion"),
        ("get", "/slots"),
        ("post", "/api/chat"),
        ("post", "/api/generate"),
        ("post", "/api/embed"),
        ("post", "/api/embeddings"),
        ("get", "/api/tags"),
        ("get", "/api/ps"),
        ("post", "/api/show"),
        ("get", "/api/version"),
    }
    assert all({"4XX", "5XX"} <= set(op["responses"]) and "422" not in op["responses"] for op in operations.values())
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "echo", "logprobs", "stop", "logit_bias", "cache_salt", "priority"} <= set(fields)
    assert (await server.http.get("/docs")).status_code == 200
