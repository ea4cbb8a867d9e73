"""API keys: denied by default, checked on the path of the ASGI scope, admin keys separate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from stub import Script, Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded() -> AsyncIterator[Server]:
    async with serving(api_key=["secret", "schlüssel"], admin_api_key="root") as server:
        yield server


def bearer(key: str) -> dict[str, str | bytes]:
    return {"Authorization": f"Bearer {key}".encode()}  # type: ignore[dict-item]


PRIVATE = ["/v1/models", "/v1/completions", "/tokenizer_info", "/openapi.json", "/nothing", "//health", "/health//"]


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_need_no_key_because_they_contain_only_public_source(guarded: Server, path: str) -> None:
    response = await guarded.http.get(path)
    assert response.status_code == 200
    assert "secret" not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
async def test_probes_need_no_key(guarded: Server, path: str) -> None:
    assert (await guarded.http.get(path)).status_code == 200


@pytest.mark.parametrize("path", PRIVATE)
async def test_all_other_paths_do(guarded: Server, path: str) -> None:
    for headers in (
        {},
        bearer("wrong"),
        {"Authorization": "secret"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic secret"},
    ):
        response = await guarded.http.request("GET", guarded.url + path, headers=headers)
        assert response.status_code == 401, headers
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_any_of_the_keys_opens(guarded: Server) -> None:
    for key in ("secret", "schlüssel"):
        assert (await guarded.http.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_prompts_are_charged_before_they_are_computed() -> None:
    async with serving(rate_limit_tokens=9) as server:
        server.engine.script = Script(gate=asyncio.Event())
        body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}
        first, second = (asyncio.create_task(server.post("/v1/completions", body)) for _ in range(2))
        await server.settle(lambda: len(server.engine.added) == 2)
        assert (await server.post("/v1/completions", body)).status_code == 429
        server.engine.script.gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert server.service.shared_state.buckets[0, 2] == pytest.approx(12, abs=1)


async def test_a_forged_host_gives_no_access(guarded: Server) -> None:
    response = await guarded.http.get("/v1/models", headers={"Host": "x/health?"})
    assert response.status_code == 401


async def test_admin_paths_accept_only_the_admin_key(guarded: Server) -> None:
    for headers in ({}, bearer("secret")):
        assert (await guarded.http.post("/admin/reset_prefix_cache", headers=headers)).status_code == 401
    assert (await guarded.http.post("/admin/reset_prefix_cache", headers=bearer("root"))).status_code == 200
    assert guarded.engine.resets == 1
    assert (await guarded.http.get("/v1/models", headers=bearer("root"))).status_code == 401
