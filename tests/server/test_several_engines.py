"""Another engine answers the requests of an engine that exits; probes and administration name each. With stubs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from exposed import value_of
from stub import Script, Server, Stub, serving

from weft.engine.wire.messages import EngineStats, PageChanges, SchedulerStats, TierStats
from weft.engine.wire.page_keys import BRIEF, page_keys, root
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState

SILENT = Script("abcdef", stop_after=0)
BROKEN_OFF = Script("abcdef", stop_after=3)
ADMIN = {"Authorization": "Bearer secret"}


def end(server: Server, engine: int) -> None:
    """End an engine as the daemon reports it."""
    server.service.engine_died(engine, restarting=True)
    server.engines[engine].die()


async def begun(server: Server, count: int = 1) -> Stub:
    """The engine that has `count` requests."""
    await server.settle(lambda: any(len(engine.added) == count for engine in server.engines))
    return next(engine for engine in server.engines if len(engine.added) == count)


def events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def retried(server: Server) -> float | None:
    return value_of(server.service.metrics, "weft_retried_total")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [SILENT, BROKEN_OFF], ids=["nothing came", "tokens came"])
async def test_requests_without_output_are_restarted_elsewhere(stream: bool, script: Script) -> None:
    async with serving(engines=2) as server:
        first, other = server.engines
        first.script, other.script = script, Script("abcdef")
        body = {"prompt": "hi", "max_tokens": 20, "seed": 5, "stream": stream}
        task = asyncio.create_task(server.post("/v1/completions", body))
        await begun(server)
        await server.settle(lambda: first.iterations == (script.stop_after or 0))
        await asyncio.sleep(0.05)
        end(server, 0)
        async with asyncio.timeout(240):
            response = await task
        assert response.status_code == 200
        if stream and script is BROKEN_OFF:
            *chunks, last = events(response)
            assert last["error"]["code"] == "engine_dead"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
            assert (len(other.added), retried(server)) == (0, 0)
        else:
            choices = [e["choices"][0] for e in events(response)[:-1]] if stream else response.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == "abcdef"
            assert (len(other.added), retried(server)) == (1, 1)
            assert other.added[0].params == first.added[0].params  # the seed too
            assert other.added[0].prompt_token_ids == first.added[0].prompt_token_ids
            assert stream or response.json()["usage"]["completion_tokens"] == 7
        shared_state, metrics = server.service.shared_state, server.service.metrics
        assert not shared_state.engine_load.any()
        assert not shared_state.load[:, :, :2].any()
        begins = value_of(metrics, "weft_time_to_first_token_seconds_count")
        ends = value_of(metrics, "weft_finished_total", {"reason": "stop"}) or 0
        aborts = value_of(metrics, "weft_aborted_total", {"cause": "engine"}) or 0
        assert begins == ends + aborts == 1


async def test_siblings_move_together_and_share_their_prompt_again() -> None:
    async with serving(engines=3) as server:
        for engine in server.engines:
            engine.script = Script("abc", stop_after=0)
        task = asyncio.create_task(server.post("/v1/completions", {"prompt": ["hi", "ho"], "n": 3, "seed": 1}))
        await server.settle(lambda: sum(len(engine.added) for engine in server.engines) == 6)
        first = next(i for i, engine in enumerate(server.engines) if engine.added)
        others = [engine for engine in server.engines if engine is not server.engines[first]]
        for engine in others:
            engine.script = Script("abc")
            for request in engine.added:  # running requests continue
                engine.tasks.add(asyncio.create_task(engine._play(request, engine.script)))
        moving = server.engines[first].added
        end(server, first)
        async with asyncio.timeout(240):
            response = await task
        assert [choice["text"] for choice in response.json()["choices"]] == ["abc"] * 6
        assert retried(server) == len(moving)
        seeds = [r.params.seed for engine in others for r in engine.added]
        assert sorted(seeds) == sorted([1, 2, 3] * 2)
        for engine in others:
            leaders = [r for r in engine.added if r.leader < 0]
            assert len(leaders) == len({r.prompt_token_ids for r in engine.added})


async def test_a_request_that_kills_engines_does_not_kill_all_of_them() -> None:
    async with serving(engines=3) as server:
        for engine in server.engines:
            engine.script = SILENT
        task = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        for _ in range(2):
            killed = await begun(server)
            killed.added.clear()
            end(server, server.engines.index(killed))
        async with asyncio.timeout(240):
            response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        assert sum(len(engine.added) for engine in server.engines) == 0


async def test_without_another_engine_there_is_an_error() -> None:
    async with serving(engines=2) as server:
        end(server, 1)
        server.engine.script = SILENT
        task = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        await begun(server)
        end(server, 0)
        async with asyncio.timeout(240):
            assert (await task).json()["error"]["code"] == "engine_dead"
        assert (await server.post("/v1/completions", {"prompt": "hi"})).json()["error"]["code"] == "loading"


async def test_a_late_engine_may_return() -> None:
    async with serving(engines=2) as server:
        server.engine.script = SILENT
        task = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        await begun(server)
        server.engine.give_up("the engine does not answer")
        await server.settle(lambda: len(server.engines[1].added) == 1)
        assert (await task).status_code == 200
        assert server.engine.aborted == [server.engine.added[0].handle]
        assert server.engine.alive


async def test_probes_name_each_engine() -> None:
    async with serving(engines=2, admin_api_key="secret") as server:

        def states(response: httpx.Response) -> list[str]:
            return [engine["state"] for engine in response.json()["engines"]]

        assert states(await server.http.get("/health")) == ["serving", "serving"]
        end(server, 0)
        assert states(await server.http.get("/ready")) == ["loading", "serving"]
        server.service.shared_state.closed[1] = 1
        assert states(await server.http.get("/admin/engines", headers=ADMIN)) == ["loading", "draining"]
        server.service.engine_died(0)
        assert states(await server.http.get("/health")) == ["dead", "draining"]
        server.service.engine_died(1)
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/ready")).json()["error"]["code"] == "dead"
        up = [value_of(server.service.metrics, "weft_engine_up", {"engine": str(i)}) for i in range(2)]
        assert up == [0, 0]


async def test_administration_reports_the_last_failure_and_its_time() -> None:
    async with serving(engines=2, admin_api_key="secret") as server:
        end(server, 0)
        server.service.failures[0] = failure = {"message": "engine 0: config.json cannot be read", "at": 1_700_000_000}
        for path in ("/admin/engines", "/admin/models"):
            answer = (await server.http.get(path, headers=ADMIN)).json()
            engines = answer["engines"] if "engines" in answer else answer["models"][0]["engines"]
            assert engines[0] == {"engine": 0, "state": "loading", "last_failure": failure}
            assert "last_failure" not in engines[1]
        for path in ("/health", "/ready"):  # which any client may read
            assert "config.json" not in (await server.http.get(path)).text


async def test_the_restart_of_engines_needs_the_admin_key_and_a_daemon() -> None:
    async with serving(engines=2, admin_api_key="secret") as server:
        path, requested = "/admin/engines/restart", []
        assert (await server.post(path, {})).status_code == 401
        assert (await server.post(path, {}, headers=ADMIN)).status_code == 501

        async def restart_engines(engines: Any) -> str:
            requested.append(engines)
            return "" if engines else "engines are already being restarted"

        server.service.restart_engines = restart_engines
        assert (await server.post(path, {"engines": [1]}, headers=ADMIN)).status_code == 202
        assert (await server.post(path, {}, headers=ADMIN)).json()["error"]["code"] == "engines_not_restarted"
        assert requested == [[1], []]
    async with serving(engines=2) as server:
        assert (await server.http.get("/admin/engines")).status_code == 404


async def test_all_prefixes_are_cleared_everywhere() -> None:
    async with serving(engines=2, admin_api_key="secret") as server:
        await server.post("/admin/reset_prefix_cache", {}, headers=ADMIN)
        assert [engine.resets for engine in server.engines] == [1, 1]


async def test_the_queue_limit_counts_the_slots_of_all() -> None:
    async with serving(engines=2, max_num_seqs=1, max_queued_requests=0) as server:
        for engine in server.engines:
            engine.script = SILENT
        tasks = [asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"})) for _ in range(2)]
        await server.settle(lambda: [len(engine.added) for engine in server.engines] == [1, 1])
        assert (await server.post("/v1/completions", {"prompt": "hi"})).json()["error"]["code"] == "queue_full"
        for task in tasks:
            task.cancel()


def test_metrics_of_each_engine_add_up_to_those_of_all() -> None:
    def stats(n: int, **tiers: TierStats) -> EngineStats:
        numbers = dict.fromkeys(("running", "waiting", "prompt_tokens", "generation_tokens", "prefix_hit_tokens"), n)
        scheduler = SchedulerStats(pages_held=n, pages_total=10, queue={"slots": n}, tiers=tiers, **numbers)
        return EngineStats(scheduler=scheduler, iterations=n, iterations_pipelined=1)

    metrics = Metrics(SharedState(1, engines=3))
    metrics.engines[0].update(stats(1, gpu=TierStats(hit_tokens=1)))
    metrics.engines[1].started(stats(100))
    metrics.engines[1].update(stats(2, gpu=TierStats(hit_tokens=2), ssd=TierStats(up=False, used=4)))
    metrics.engines[2].update(stats(5, gpu=TierStats(hit_tokens=5), ssd=TierStats(used=6)))
    metrics.engines[2].died()
    for name, each in {
        "requests_running": [1, 2, 0],
        "requests_waiting": [1, 2, 0],
        "prompt_tokens_total": [1, 102, 5],
        "generation_tokens_total": [1, 102, 5],
    }.items():
        assert [value_of(metrics, f"weft_engine_{name}", {"engine": str(i)}) for i in range(3)] == each
        assert value_of(metrics, f"weft_{name}") == sum(each)
    assert value_of(metrics, "weft_requests_queued", {"reason": "slots"}) == 3
    assert value_of(metrics, "weft_iterations_total", {"plan": "serial"}) == 108 - 4
    assert value_of(metrics, "weft_prefix_cache_hit_tokens_total", {"tier": "gpu"}) == 8
    assert value_of(metrics, "weft_kv_tier_used_pages", {"tier": "ssd"}) == 4
    assert value_of(metrics, "weft_kv_tier_up", {"tier": "ssd"}) == 0
    assert value_of(metrics, "weft_kv_cache_usage_ratio") == 3 / 20


async def test_pages_of_another_tenant_attract_no_request() -> None:
    async with serving(engines=2) as server:
        prompt = server.engine.tokenizer.encode("hello world " * 40)
        keys = page_keys(root("", "mine"), np.array(prompt, np.int32), 64)
        assert server.engines[1].on_stats is not None
        server.engines[1].on_stats(EngineStats(pages=PageChanges(b"".join(key[:BRIEF] for key in keys))))
        for salt, engine in (("mine", 1), ("theirs", 0), ("mine", 1), ("", 0)):
            for each in server.engines:
                each.added.clear()
            await server.complete(prompt=prompt, cache_salt=salt)
            assert len(server.engines[engine].added) == 1, salt
