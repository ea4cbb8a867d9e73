"""deploy/ray in a private Ray on a CPU: the clients' view while replicas stream, die, start and stop.

`make ray` runs it. Ray is not part of the environment of the other tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="make ray has it")

from openai import AsyncOpenAI, BadRequestError, NotFoundError
from ray_live import PATIENCE, Load, Stream, ask, own_ray, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"model": "demo", "num_cpus": 0.5, "ingress": {"num_cpus": 0.5}}
LONG: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_ray() as address:
        yield address


def deploy(**args: Any) -> Any:
    """The handle of the demo's deployment."""
    from ray import serve

    from weft.deploy.ray import app

    serve.run(app({**SMALL, **args}), name="weft")
    return serve.get_deployment_handle("weft-demo", "weft")


def running(deployment: str = "weft-demo") -> int:
    from ray import serve

    application = serve.status().applications["weft"]
    return int(application.deployments[deployment].replica_states.get("RUNNING", 0))


async def process_ids(handle: Any) -> list[dict[str, int]]:
    return list(await handle.broadcast("process_ids").results_async(timeout_s=PATIENCE))


def figure(url: str, name: str) -> float:
    """The sum of a metric over all replicas."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


async def test_the_api_is_passed_through_unchanged(url: str) -> None:
    deploy(replicas=2)
    api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
    question: Any = [{"role": "user", "content": "What is 1 + 2?"}]
    whole = await api.chat.completions.create(model="demo", messages=question, temperature=0)
    stream = await api.chat.completions.create(model="demo", messages=question, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    assert [model.id async for model in api.models.list()] == ["demo"]
    with pytest.raises(BadRequestError, match="temperature"):
        await api.chat.completions.create(model="demo", messages=question, temperature=-1)
    with pytest.raises(NotFoundError, match="served: demo"):
        await api.chat.completions.create(model="other", messages=question)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        body = {"model": "demo", "prompt": ""}
        named = await client.post("/v1/completions", json=body, headers={"x-request-id": "a1"})
        assert named.status_code == 400
        assert named.headers.get_list("x-request-id") == ["a1"]
        assert (await client.get("/nowhere")).json()["error"]["type"] == "not_found_error"
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.head("/v1/models")).status_code == 200
        assert (await client.post("/admin/reset_prefix_cache")).status_code == 501
        lines = (await client.get("/metrics")).text.splitlines()
        assert len({line.split('"')[1] for line in lines if "replica=" in line}) == 2


async def test_requests_with_a_shared_prefix_go_to_the_replica_with_its_pages(url: str) -> None:
    deploy(replicas=2, options={"max_num_seqs": 16})  # replicas that have seen no request
    text = "Tell me about the weaver, the loom and the thread. " * 20
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for i in range(5):
            answer = await ask(client, f"{text} And {i}?", Stream(), max_tokens=4)
            assert answer.good
        lines = (await client.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("weft_prompt_tokens_total{")]
    assert sorted(float(line.rsplit(" ", 1)[1]) > 0 for line in counted) == [False, True]


async def test_a_client_that_disconnects_ends_its_request(url: str) -> None:
    deploy(replicas=2)
    before = figure(url, "weft_generation_tokens_total")
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        body = {"model": "demo", "stream": True, "prompt": "One", "max_tokens": 1800, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
        await asyncio.to_thread(until, lambda: figure(url, "weft_requests_running") == 0)
    assert figure(url, "weft_generation_tokens_total") - before < 1800


async def test_a_killed_replica_loses_only_its_own_answers(url: str) -> None:
    handle = deploy(replicas=2, options={"max_num_seqs": 8})
    victim, other = await process_ids(handle)
    streams = [Stream() for _ in range(50)]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        # Long enough that the answers last until the kill, even if the client reads them late.
        long = {"max_tokens": 400, "ignore_eos": True}
        requested = [asyncio.create_task(ask(client, f"Tell me {i}", s, **long)) for i, s in enumerate(streams)]
        await asyncio.to_thread(until, lambda: sum(bool(s.events) for s in streams) >= 12)
        os.kill(victim["worker"], signal.SIGKILL)
        await asyncio.gather(*requested)
    assert all(s.has_outcome for s in streams)
    lost = [s for s in streams if not s.good]
    assert lost
    # Answers that the victim had finished but not yet passed on are lost, too; those of living replicas are not.
    scraped = httpx.get(f"{url}/metrics", timeout=PATIENCE)
    assert scraped.status_code == 200, scraped.text
    served = [
        float(line.rsplit(" ", 1)[1])
        for line in scraped.text.splitlines()
        if line.startswith("weft_requests_total{") and 'endpoint="/v1/chat/completions",status="200"' in line
    ]
    assert 0 < sum(served) <= len(streams) - len(lost)
    assert {s.error["code"] for s in lost if s.error} == {"engine_dead"}
    assert all(s.events for s in lost), "one that had nothing yet was not begun again"
    await asyncio.to_thread(until, lambda: running() == 2)
    assert other in await process_ids(handle)
    until(lambda: not os.path.exists(f"/proc/{victim['daemon']}"))


async def test_it_scales_up_and_down_under_load_without_a_failed_request(url: str) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 3, "target_requests": 4, "upscale_delay_s": 1, "downscale_delay_s": 3,
        "interval_s": 1,
    }  # fmt: skip
    deploy(scaling=scaling, drain_timeout_s=PATIENCE)
    async with Load(url, 1, max_tokens=20) as few:
        async with Load(url, 16, **LONG) as many:
            await asyncio.to_thread(until, lambda: running() == 3)
            so_far = len(many.ended)
            await asyncio.to_thread(until, lambda: len(many.ended) > so_far + 16)
        await asyncio.to_thread(until, lambda: running() == 1)
        so_far = len(few.ended)
        await asyncio.to_thread(until, lambda: len(few.ended) > so_far)
    assert [s for s in many.ended + few.ended if not s.good] == []


async def test_a_rolling_update_fails_no_request(url: str) -> None:
    handle = deploy(replicas=2)
    before = {each["worker"] for each in await process_ids(handle)}
    async with Load(url, 8, **LONG) as load:
        await asyncio.to_thread(until, lambda: len(load.ended) > 4)
        await asyncio.to_thread(deploy, replicas=2, options={"max_num_seqs": 32})
        so_far = len(load.ended)
        await asyncio.to_thread(until, lambda: len(load.ended) > so_far + 8)
        after = {each["worker"] for each in await process_ids(handle)}
    assert not before & after
    assert [s for s in load.ended if not s.good] == []


async def test_two_models_in_one_application_one_of_them_on_two_ranks(url: str) -> None:
    from ray import serve

    from weft.deploy.ray import app

    models = [
        {"model": "demo", "name": "one", "num_cpus": 0.5},
        {"model": "demo", "name": "org/two", "num_cpus": 1, "options": {"tensor_parallel_size": 2, "device": "cpu"}},
    ]
    await asyncio.to_thread(serve.delete, "weft")
    made = app({"models": models, "ingress": {"num_cpus": 0.5}})
    await asyncio.to_thread(serve.run, made, name="weft", route_prefix="/llm")
    async with httpx.AsyncClient(base_url=f"{url}/llm", timeout=PATIENCE) as client:
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["one", "org/two"]
        assert (await client.get("/v1/models/org/two")).json()["id"] == "org/two"
        assert (await client.get("/ready")).json() == {"status": "ready"}
        output = {}
        for name in ("one", "org/two"):
            body = {"model": name, "prompt": "One, two,", "temperature": 0, "max_tokens": 8}
            output[name] = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        assert output["one"] == output["org/two"] != ""
        assert (await client.post("/v1/completions", json={"model": "three", "prompt": "a"})).status_code == 404
        assert await asyncio.to_thread(figure, f"{url}/llm", "weft_engine_ranks") == 2
    await asyncio.to_thread(serve.delete, "weft")


async def test_rays_endpoint_has_metrics_of_the_engine(url: str) -> None:
    import ray

    deploy(replicas=1)
    port = ray.nodes()[0]["MetricsExportPort"]
    async with Load(url, 1, max_tokens=5) as load:
        await asyncio.to_thread(until, lambda: len(load.ended) > 3)

        def exposed() -> bool:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).text
            lines = [line for line in text.splitlines() if line.startswith("ray_weft_generation_tokens_total{")]
            return any(float(line.rsplit(" ", 1)[1]) > 0 and 'deployment="weft-demo"' in line for line in lines)

        await asyncio.to_thread(until, exposed)
