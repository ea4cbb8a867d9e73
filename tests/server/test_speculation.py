"""Speculation over HTTP: what reaches the engine, what the usage says, and the metrics."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stub import MAX_MODEL_LEN, Script, Server

from weft.engine.wire.messages import EngineStats, SpeculationStats
from weft.server.observe.engine_metrics import EngineMetrics
from weft.server.observe.totals import plus, summed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREDICTION = {"type": "content", "content": "one two three"}


def predicted_ids(server: Server) -> list[int]:
    return np.frombuffer(server.engine.added[-1].prediction, np.int32).tolist()


@pytest.mark.parametrize(
    "content", ["one two three", [{"type": "text", "text": "one two"}, {"type": "text", "text": " three"}]]
)
async def test_a_prediction_reaches_the_engine_as_tokens(server: Server, content: Any) -> None:
    await server.chat(prediction={"type": "content", "content": content})
    assert predicted_ids(server) == server.engine.tokenizer.encode("one two three", add_special_tokens=False)
    await server.chat()
    assert predicted_ids(server) == []


async def test_a_long_prediction_is_cut_to_the_context(server: Server) -> None:
    await server.chat(prediction={"type": "content", "content": "one two " * 2 * MAX_MODEL_LEN})
    assert len(predicted_ids(server)) == MAX_MODEL_LEN


async def test_usage_counts_the_tokens_of_a_prediction(server: Server) -> None:
    server.engine.script = Script("abc", predicted=(5, 2))
    details = (await server.chat(prediction=PREDICTION))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    details = (await server.chat(prediction=PREDICTION, n=2))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 4}
    assert "completion_tokens_details" not in (await server.chat())["usage"]


async def test_a_prediction_without_a_draft_counts_zero(server: Server) -> None:
    server.engine.script = Script("abc")
    details = (await server.chat(prediction={"type": "content", "content": ""}))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content"),
        ("a", "prediction"),
    ],
)
async def test_a_malformed_prediction_is_refused(server: Server, prediction: Any, param: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await server.post("/v1/chat/completions", {"messages": messages, "prediction": prediction})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("limit", [0, 3, None])
async def test_a_limit_of_drafts_reaches_the_engine(server: Server, limit: int | None) -> None:
    await server.complete(speculation={"max_tokens": limit})
    assert server.engine.added[-1].max_drafts == limit
    await server.chat(speculation={"max_tokens": limit})
    assert server.engine.added[-1].max_drafts == limit
    answer = await server.post("/v1/responses", {"input": "hi", "speculation": {"max_tokens": limit}})
    assert answer.status_code == 200
    assert server.engine.added[-1].max_drafts == limit


@pytest.mark.parametrize("speculation", [{"max_tokens": -1}, {"max_tokens": "3"}, 4])
async def test_a_malformed_limit_is_refused(server: Server, speculation: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "hi", "speculation": speculation})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("speculation")


async def test_a_stream_reports_a_prediction_with_its_usage(server: Server) -> None:
    server.engine.script = Script("abc", predicted=(1, 2))
    body = {"messages": [{"role": "user", "content": "hi"}], "prediction": PREDICTION, "stream": True}
    answer = await server.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    last = json.loads(answer.text.split("data: ")[-2])
    details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2}
    assert last["usage"]["completion_tokens_details"] == details


STATS = EngineStats(
    speculation=SpeculationStats(
        drafts=4, draft_tokens={"text": 9, "prediction": 3}, accepted_tokens={"text": 6, "grammar": 2},
        accepted_by_position={"0": 4, "10": 1, "2": 2}, foreseen_tokens=3.0, last_requests=2, last_draft_tokens=3,
        pauses=1,
    )
)  # fmt: skip


def exposed(*stats: EngineStats) -> dict[tuple[str, str], float]:
    metrics = EngineMetrics(len(stats))
    for figures, of in zip(metrics.engines, stats, strict=True):
        figures.update(of)
    families = text_string_to_metric_families(metrics.text([False] * len(stats)).decode())
    return {(s.name, next(iter(s.labels.values()), "")): s.value for family in families for s in family.samples}


async def test_metrics_have_weft_names_and_those_of_vllm() -> None:
    values = exposed(STATS)
    assert values["weft_speculation_drafts_total", ""] == values["vllm:spec_decode_num_drafts_total", ""] == 4
    assert values["weft_speculation_draft_tokens_total", "text"] == 9
    assert values["weft_speculation_draft_tokens_total", "grammar"] == 0
    assert values["vllm:spec_decode_num_draft_tokens_total", ""] == 12
    assert values["vllm:spec_decode_num_accepted_tokens_total", ""] == 8
    places = [label for name, label in values if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert places == ["0", "2", "10"]
    assert values["weft_speculation_accepted_per_position_total", "10"] == 1
    assert values["weft_speculation_depth", ""] == 1.5
    assert values["weft_speculation_foreseen_ratio", ""] == 0.5  # a grammar's tokens are not foreseen
    assert values["weft_speculation_pauses_total", ""] == 1


async def test_totals_continue_after_a_restart_and_add_up_over_engines() -> None:
    again = plus(STATS, STATS).speculation
    assert again.drafts == 8
    assert again.draft_tokens == {"text": 18, "prediction": 6}
    assert again.accepted_by_position == {"0": 8, "10": 2, "2": 4}
    assert again.last_requests == 2
    both = summed([STATS, EngineStats(), STATS]).speculation
    assert (both.drafts, both.last_requests, both.last_draft_tokens) == (8, 4, 6)
    assert exposed(STATS, STATS)["weft_speculation_depth", ""] == 1.5
