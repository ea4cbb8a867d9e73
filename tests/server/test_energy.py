"""Joules over HTTP: in a request's usage on request, and in the metrics if a counter is read."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from stub import Script, Server, serving
from test_completions import events
from test_metrics import METERED

from weft.engine.wire.messages import EnergyStats, EngineStats

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _metered() -> AsyncIterator[Server]:
    async with serving(energy_source="nvml") as server:
        yield server


@pytest.fixture
def metered(_metered: Server) -> Server:
    _metered.engine.script = Script("abc", joules=0.25)
    return _metered


async def test_usage_includes_joules_on_request(metered: Server) -> None:
    assert (await metered.complete(include_energy=True, max_tokens=3))["usage"]["energy_joules"] == 0.75
    assert (await metered.chat(include_energy=True, max_tokens=2))["usage"]["energy_joules"] == 0.5
    assert "energy_joules" not in (await metered.complete())["usage"]
    assert not metered.engine.added[-1].metered


async def test_choices_and_prompts_are_added_up(metered: Server) -> None:
    answer = await metered.complete(include_energy=True, max_tokens=3, n=2, prompt=["a", "b"])
    assert answer["usage"]["energy_joules"] == 3.0


async def test_a_stream_reports_them_with_its_usage(metered: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = await events(metered, stream_options=options, max_tokens=3, include_energy=True)
    assert last["usage"]["energy_joules"] == 0.75
    assert [chunk["usage"]["energy_joules"] for chunk in chunks] == [0.25, 0.5, 0.75]


async def test_an_answer_ended_by_a_stop_string_reports_its_charge_so_far(metered: Server) -> None:
    assert (await metered.complete(include_energy=True, stop="b"))["usage"]["energy_joules"] == 0.5


async def test_without_a_counter_joules_are_null(server: Server) -> None:
    assert (await server.complete(include_energy=True))["usage"]["energy_joules"] is None


async def test_metrics_include_joules_if_they_are_counted(metered: Server) -> None:
    async def joules() -> dict[str, tuple[float, dict[str, str]]]:
        families = text_string_to_metric_families((await metered.http.get("/metrics")).text)
        return {s.name: (s.value, s.labels) for f in families for s in f.samples if s.name.startswith("weft_energy_")}

    assert await joules() == {}
    energy = EnergyStats(source="nvml", joules=10.0, idle_joules=4.0, charged=5.5)
    metered.service.metrics.engines[0].update(EngineStats(energy=energy))
    labels = {"device": "cpu", "source": "nvml"}
    assert {f"{name}_total" for name in METERED} == set(await joules())
    assert await joules() == {
        "weft_energy_joules_total": (10.0, labels),
        "weft_energy_idle_joules_total": (4.0, labels),
        "weft_energy_request_joules_total": (5.5, labels),
    }
