"""Several models with one API: the model that answers, the effect of one's end on the others, and requests for models
that sleep.

Engines are stubs, and the test plays the daemon that puts models to sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from exposed import value_of
from prometheus_client.parser import text_string_to_metric_families
from stub import Script, Server, serving
from test_metrics import OF_SEVERAL_MODELS
from vocabularies import byte_level, wrapped

from weft.server.api.aliases import ADMIN_ALIASES
from weft.server.api.service import Service
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState
from weft.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio

MODELS = ["demo served_model_name=a served_model_name=first", "demo served_model_name=b"]
ADMIN = {"Authorization": "Bearer secret"}
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(models=MODELS, admin_api_key="secret", wake_timeout=60) as server:
        for name, engine in zip("ab", server.engines, strict=True):
            engine.script = Script(f"I am {name}")
        yield server


class Sleepable:
    """The daemon's part: moves a model when the test allows it."""

    def __init__(self, service: Service) -> None:
        self.shared_state: SharedState = service.shared_state
        self.lets = asyncio.Event()
        self.requested: list[Any] = []
        self.refusal = ""
        service.wake, service.sleep = self.wake, self.sleep

    def set_sleep_state(self, model: int, state: SleepState) -> None:
        with self.shared_state.lock():
            self.shared_state.sleep_states[model] = state

    async def wake(self, model: int, operator: bool = False) -> str:
        self.requested.append((model, "operator") if operator else model)
        await self.lets.wait()
        if not self.refusal:
            self.set_sleep_state(model, SleepState.AWAKE)
        return self.refusal

    async def sleep(self, model: int, level: int, seconds: float | None) -> str:
        self.requested.append((model, level, seconds))
        if not self.refusal:
            self.set_sleep_state(model, SleepState.ASLEEP if level else SleepState.PAUSED)
        return self.refusal


async def text_of(server: Server, model: str | None) -> str:
    answer = await server.post("/v1/completions", {"prompt": "hi", **({"model": model} if model else {})})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_ready_waits_until_other_processes_serve_each_model_for_the_first_time() -> None:
    async with serving(models=MODELS, attach=False) as server:
        a, b = server.service.models

        async def code() -> Any:
            return (await server.http.get("/ready")).json().get("error", {}).get("code")

        async def attach(service: Service, engine: int) -> None:
            stub = server.engines[engine]
            service.attach(stub, stub.describe(), Tokenizer(wrapped(byte_level())), engine, alone=True)

        await attach(a, 0)
        a.engine_shared(0)
        await attach(b, 1)
        assert await code() == "loading", "another process may refuse b"
        b.engine_died(1, restarting=True)
        assert await code() == "loading", "it has been served nowhere else"
        await attach(b, 1)
        b.engine_shared(1)
        assert await code() is None
        b.engine_died(1, restarting=True)
        assert await code() is None, "one model is enough from then on"


@pytest.mark.parametrize(("requested", "name"), [("first", "a"), ("b", "b"), (None, "a")])
async def test_a_request_is_answered_by_the_model_it_names(server: Server, requested: str | None, name: str) -> None:
    assert await text_of(server, requested) == f"I am {name}"
    body = {"messages": HI, **({"model": requested} if requested else {})}
    chat = (await server.post("/v1/chat/completions", body)).json()
    assert chat["choices"][0]["message"]["content"] == f"I am {name}"
    assert chat["model"] == (requested or "a")
    response = (
        await server.post("/v1/responses", {"input": "hi", **({"model": requested} if requested else {})})
    ).json()
    assert response["output"][-1]["content"][0]["text"] == f"I am {name}"
    message = (await server.post("/v1/messages", {**body, "model": requested or "a", "max_tokens": 9})).json()
    assert message["content"][0]["text"] == f"I am {name}"
    for path, fields in (
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/completions/render", {"prompt": "hi"}),
        ("/v1/chat/completions/render", {"messages": HI}),
        ("/apply-template", {"messages": HI}),
        ("/v1/messages/count_tokens", {"messages": HI, "model": "a"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ):
        named = {**fields, **({"model": requested} if requested else {})}
        assert (await server.post(path, named)).status_code == 200, path
        refused = await server.post(path, {**fields, "model": "nobody"})
        assert (refused.status_code, refused.json()["error"]["type"]) in [
            (404, "not_found_error"), (404, "invalid_request_error")
        ], path  # fmt: skip
    assert not server.service.shared_state.load.any(), "a request that has ended is still in a model"


async def test_an_unknown_name_is_a_404_that_lists_all(server: Server) -> None:
    error = await server.post("/v1/chat/completions", {"model": "c", "messages": HI})
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert "served: a, first, b" in error.json()["error"]["message"]
    assert (await server.http.get("/v1/models/c")).status_code == 404
    assert (await server.post("/v1/embeddings", {"model": "c", "input": "hi"})).status_code == 404


async def test_the_models_are_listed_with_their_names(server: Server) -> None:
    listed = (await server.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [("a", "a"), ("first", "a"), ("b", "b")]
    assert (await server.http.get("/v1/models/b")).json()["id"] == "b"
    theirs = await server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert [model["id"] for model in theirs.json()["data"]] == ["a", "first", "b"]


async def test_the_end_of_one_model_does_not_affect_the_other(server: Server) -> None:
    server.engines[0].die()
    server.service.models[0].engine_died(0, restarting=False)
    refused = await server.post("/v1/completions", {"model": "a", "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "dead")
    assert await text_of(server, "b") == "I am b"
    for path in ("/ready", "/health"):
        answer = await server.http.get(path)
        assert answer.status_code == 200
        assert answer.json()["models"] == [{"model": "a", "state": "dead"}, {"model": "b", "state": "awake"}]
    assert not server.service.closing
    server.engines[1].die()
    server.service.models[1].engine_died(1, restarting=False)
    assert (await server.http.get("/ready")).status_code == (await server.http.get("/health")).status_code == 503


async def test_a_daemon_is_ready_once_all_models_of_the_start_are_loaded() -> None:
    async with serving(models=[*MODELS, "demo served_model_name=c"], attach=False) as server:
        daemon = Sleepable(server.service)
        daemon.set_sleep_state(2, SleepState.ASLEEP)
        assert (await server.http.get("/ready")).status_code == 503
        for model in (1, 0):  # the first loaded model does not make the others ready
            assert (await server.http.get("/ready")).status_code == 503
            engine = server.engines[model]
            tokenizer = Tokenizer(wrapped(byte_level()))
            server.service.models[model].attach(engine, engine.describe(), tokenizer, model)
        assert (await server.http.get("/ready")).status_code == 200


async def test_metrics_are_exposed_by_model(server: Server) -> None:
    await text_of(server, "a")
    await text_of(server, "b")
    await text_of(server, "b")
    metrics = server.service.metrics
    kinds = {family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())}
    assert OF_SEVERAL_MODELS.items() <= kinds.items()
    for model, count in (("a", 1), ("b", 2)):
        count_of = "weft_model_time_to_first_token_seconds_count"
        assert value_of(metrics, count_of, {"model_name": model}) == count
        assert value_of(metrics, "weft_model_requests_running", {"model_name": model}) == 1  # as in the stub's messages
        assert value_of(metrics, "weft_model_state", {"model_name": model, "state": "awake"}) == 1


async def test_requests_queue_for_a_sleeping_model_and_wake_it_once(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.set_sleep_state(1, SleepState.ASLEEP)
    asking = [asyncio.create_task(text_of(server, "b")) for _ in range(5)]
    await server.settle(lambda: int(daemon.shared_state.load[0, 1, WAITING]) == 5)
    assert await text_of(server, "a") == "I am a"
    assert not server.engines[1].added
    assert (await server.http.get("/ready")).json()["models"][1] == {"model": "b", "state": "asleep"}
    daemon.lets.set()
    assert await asyncio.gather(*asking) == ["I am b"] * 5
    assert daemon.requested == [1]
    assert not daemon.shared_state.load[:, 1, ENTERED:].any()
    assert daemon.shared_state.used[1] > 0


async def test_a_request_counts_for_its_model_until_its_answer_has_ended(server: Server) -> None:
    gate = server.engines[1].script.gate = asyncio.Event()
    asking = asyncio.create_task(text_of(server, "b"))
    await server.settle(lambda: bool(server.engines[1].added))
    assert server.service.shared_state.load[0, :, ENTERED].tolist() == [0, 1]
    gate.set()
    await asking
    body = {"model": "b", "input": "hi", "background": True}
    gate = server.engines[1].script.gate = asyncio.Event()
    response = (await server.post("/v1/responses", body)).json()
    assert server.service.shared_state.load[0, :, ENTERED].tolist() == [0, 1], "nobody waits, and yet it is worked on"
    gate.set()
    await server.settle(lambda: not server.service.shared_state.load.any())
    done = (await server.http.get(f"/v1/responses/{response['id']}")).json()
    assert done["status"] == "completed"


async def test_a_model_that_does_not_wake_in_time_is_a_503(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.set_sleep_state(1, SleepState.ASLEEP)
    object.__setattr__(server.service.models[1].config, "wake_timeout", 0.05)
    refused = await server.post("/v1/completions", {"model": "b", "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_waking")
    assert int(refused.headers["retry-after"]) > 0
    assert not daemon.shared_state.load.any()
    daemon.lets.set()  # it continues to wake
    await server.settle(lambda: daemon.shared_state.sleep_states[1] == SleepState.AWAKE)


async def test_a_model_that_cannot_wake_reports_the_reason(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.set_sleep_state(0, SleepState.ASLEEP)
    daemon.refusal = "b has requests that take longer"
    daemon.lets.set()
    refused = await server.post("/v1/completions", {"model": "a", "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert daemon.refusal in refused.json()["error"]["message"]


async def test_requests_wake_no_model_if_disabled() -> None:
    async with serving(models=MODELS, wake_on_request=False) as server:
        daemon = Sleepable(server.service)
        daemon.set_sleep_state(1, SleepState.ASLEEP)
        refused = await server.post("/v1/completions", {"model": "b", "prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
        assert "retry-after" in refused.headers
        assert (await server.http.get("/ready")).status_code == 200
        daemon.set_sleep_state(0, SleepState.ASLEEP)
        assert (await server.http.get("/ready")).status_code == 503
        assert not daemon.requested


async def test_a_bad_request_wakes_no_model(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.set_sleep_state(1, SleepState.ASLEEP)
    bad: Sequence[dict[str, Any]] = ({"prompt": "hi", "best_of": 7, "n": 9}, {"prompt": "hi", "temperature": -1})
    for fields in bad:
        assert (await server.post("/v1/completions", {"model": "b", **fields})).status_code == 400
    assert not daemon.requested


async def test_an_operator_moves_models(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.lets.set()

    async def post(path: str, **body: Any) -> Any:
        return await server.post(path, body, headers=ADMIN)

    answer = await post("/admin/sleep", model="b", level=2, drain_seconds=1.5)
    assert answer.json() == {"model": "b", "state": "asleep"}
    models = (await server.http.get("/admin/models", headers=ADMIN)).json()["models"]
    assert [(m["model"], m["state"], m.get("level")) for m in models] == [("a", "awake", None), ("b", "asleep", 1)]
    assert models[0]["names"] == ["a", "first"]
    assert models[1]["memory_share"] == 0.5
    assert (await post("/admin/wake", model="b")).json() == {"model": "b", "state": "awake"}
    assert daemon.requested == [(1, 2, 1.5), (1, "operator")]
    daemon.refusal = "a is waking"
    refused = await post("/admin/sleep")
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "A is waking.")
    assert daemon.requested[-1] == (0, 1, None)
    assert (await post("/admin/sleep", model="nobody")).status_code == 404
    assert (await post("/admin/sleep", level=3)).status_code == 400
    assert (await server.post("/admin/sleep", {})).status_code == 401


async def test_vllms_paths_move_models(server: Server) -> None:
    daemon = Sleepable(server.service)
    daemon.lets.set()
    for engine in server.engines:
        engine.resets = 0

    async def post(path: str, status: int = 200) -> Any:
        answer = await server.http.post(path, headers=ADMIN)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(path: str) -> Any:
        return (await server.http.get(path, headers=ADMIN)).json()

    assert await get("/is_sleeping") == {"is_sleeping": False}
    assert (await post("/sleep"))["state"] == "asleep"
    assert await get("/is_sleeping") == {"is_sleeping": True}
    assert (await post("/wake_up?tags=weights&tags=kv_cache"))["state"] == "awake"
    await post("/sleep?level=2&mode=wait&model=b")
    await post("/wake_up?model=b")
    assert daemon.requested == [(0, 1, 0.0), (0, "operator"), (1, 2, 86400.0), (1, "operator")]
    daemon.requested.clear()
    assert await post("/pause?model=b&mode=wait") == {"status": "paused", "model": "b", "state": "paused"}
    assert [engine.resets for engine in server.engines] == [0, 1]
    assert await get("/is_paused?model=b") == {"is_paused": True}
    assert (await get("/admin/models"))["models"][1]["state"] == "paused"
    assert await post("/resume?model=b") == {"status": "resumed", "model": "b", "state": "awake"}
    await post("/pause?clear_cache=false")
    assert (await server.http.get("/ready")).status_code == 200  # the other model serves
    await post("/resume")
    assert daemon.requested == [(1, 0, 86400.0), (1, "operator"), (0, 0, 0.0), (0, "operator")]
    assert [engine.resets for engine in server.engines] == [0, 1]
    await post("/reset_prefix_cache")
    assert [engine.resets for engine in server.engines] == [1, 2]
    for path in ("/wake_up?tags=weights", "/sleep?mode=keep", "/pause?mode=x", "/sleep?level=3"):
        name = path.partition("?")[2].partition("=")[0]
        assert name in (await post(path, 400))["error"]["message"]
    await post("/reset_prefix_cache?reset_running_requests=true", 400)
    await post("/sleep?model=nobody", 404)


@pytest.mark.parametrize("path", sorted(ADMIN_ALIASES))
async def test_vllms_paths_for_operators_need_the_admin_key(server: Server, path: str) -> None:
    for variant in (path, f"{path}/"):
        for method in ("GET", "POST"):
            assert (await server.http.request(method, variant)).status_code == 401
    async with serving() as without:
        assert (await without.http.post(path)).status_code == 404


async def test_an_interruption_ends_only_the_answers_of_that_model(server: Server) -> None:
    from weft.server.errors import ApiError

    gates = []
    for engine in server.engines:
        engine.script.gate = asyncio.Event()
        gates.append(engine.script.gate)
    asking = [
        asyncio.create_task(server.post("/v1/completions", {"model": name, "prompt": "hi"})) for name in ("a", "b")
    ]
    await server.settle(lambda: all(engine.added for engine in server.engines))
    error = ApiError(503, "The model goes to sleep.", code="model_asleep", retry_after=10)
    server.service.models[1].interrupt_model(error, "sleep")
    ended = await asking[1]
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "model_asleep")
    gates[0].set()
    assert (await asking[0]).status_code == 200
    assert value_of(server.service.metrics, "weft_aborted_total", {"cause": "sleep"}) == 1


async def test_a_draining_daemon_wakes_no_model(server: Server) -> None:
    from weft.server.api.service import Phase

    daemon = Sleepable(server.service)
    daemon.set_sleep_state(1, SleepState.ASLEEP)
    for service in server.service.models:
        service.phase = Phase.DRAINING
    refused = await server.post("/v1/completions", {"model": "b", "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert not daemon.requested
