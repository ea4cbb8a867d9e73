"""Metric names are an API: a rename empties every dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from exposed import value_of
from prometheus_client.parser import text_string_to_metric_families
from stub import Script, Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = {
    "weft_requests_running": "gauge",
    "weft_requests_waiting": "gauge",
    "weft_requests_queued": "gauge",
    "weft_max_num_seqs_now": "gauge",
    "weft_max_num_seqs_changes": "counter",
    "weft_max_running_requests": "gauge",
    "weft_max_iteration_tokens": "gauge",
    "weft_kv_cache_usage_ratio": "gauge",
    "weft_cache_config_info": "gauge",
    "weft_prefix_cache_queried_tokens": "counter",
    "weft_prefix_cache_hit_tokens": "counter",
    "weft_prefix_cache_missed_tokens": "counter",
    "weft_kv_tier_bytes_in": "counter",
    "weft_kv_tier_bytes_out": "counter",
    "weft_kv_tier_bytes_saved": "counter",
    "weft_kv_tier_raw_pages": "counter",
    "weft_kv_tier_evictions": "counter",
    "weft_kv_tier_idle_spilled_pages": "counter",
    "weft_kv_tier_prefetched_pages": "counter",
    "weft_kv_tier_failures": "counter",
    "weft_prefix_cache_tokens_by_length": "counter",
    "weft_prefix_cache_stateless_tokens": "counter",
    "weft_state_checkpoints": "gauge",
    "weft_state_bytes": "gauge",
    "weft_pinned_pages": "gauge",
    "weft_pins_displaced": "counter",
    "weft_kv_tier_used_pages": "gauge",
    "weft_kv_tier_capacity_pages": "gauge",
    "weft_kv_tier_up": "gauge",
    "weft_kv_load_seconds": "histogram",
    "weft_grammar_compile_seconds": "histogram",
    "weft_grammar_compiles": "counter",
    "weft_images": "counter",
    "weft_image_pixels": "counter",
    "weft_image_fetch_seconds": "histogram",
    "weft_image_decode_seconds": "histogram",
    "weft_time_to_first_token_seconds": "histogram",
    "weft_inter_token_latency_seconds": "histogram",
    "weft_time_per_output_token_seconds": "histogram",
    "weft_request_latency_seconds": "histogram",
    "weft_normalized_latency_seconds": "histogram",
    "weft_queue_time_seconds": "histogram",
    "weft_key_queue_time_seconds": "histogram",
    "weft_prefill_time_seconds": "histogram",
    "weft_decode_time_seconds": "histogram",
    "weft_prompt_tokens": "counter",
    "weft_generation_tokens": "counter",
    "weft_computed_tokens": "counter",
    "weft_attention_iterations": "counter",
    "weft_attention_cut_iterations": "counter",
    "weft_prompts_cut": "counter",
    "weft_itl_slo_late": "counter",
    "weft_iterations": "counter",
    "weft_plan_pipelines": "gauge",
    "weft_device_idle_seconds": "counter",
    "weft_iteration_tokens": "histogram",
    "weft_iteration_seconds": "histogram",
    "weft_batch_requests": "histogram",
    "weft_preemptions": "counter",
    "weft_nonfinite_logits": "counter",
    "weft_displaced": "counter",
    "weft_yielded": "counter",
    "weft_overtaken": "counter",
    "weft_requests": "counter",
    "weft_finished": "counter",
    "weft_rejected": "counter",
    "weft_aborted": "counter",
    "weft_requests_lost": "counter",
    "weft_model_state": "gauge",
    "weft_model_sleeps": "counter",
    "weft_model_wakes": "counter",
    "weft_model_wake_seconds": "histogram",
    "weft_model_requests_running": "gauge",
    "weft_model_requests_waiting": "gauge",
    "weft_model_prompt_tokens": "counter",
    "weft_model_generation_tokens": "counter",
    "weft_clients_stalled": "counter",
    "weft_accepts_refused": "counter",
    "weft_storage_failing": "gauge",
    "weft_log_lines_dropped": "counter",
    "weft_engine_restarts": "counter",
    "weft_api_process_restarts": "counter",
    "weft_engine_hangs": "counter",
    "weft_api_process_hangs": "counter",
    "weft_restarts_given_up": "counter",
    "weft_engine_up": "gauge",
    "weft_engine_asleep": "gauge",
    "weft_engine_requests_running": "gauge",
    "weft_engine_requests_waiting": "gauge",
    "weft_engine_kv_cache_usage_ratio": "gauge",
    "weft_engine_prompt_tokens": "counter",
    "weft_engine_generation_tokens": "counter",
    "weft_engine_prefix_queried_tokens": "counter",
    "weft_engine_prefix_hit_tokens": "counter",
    "weft_retried": "counter",
    "weft_engine_last_beat_seconds": "gauge",
    "weft_api_process_last_beat_seconds": "gauge",
    "weft_event_loop_lag_seconds": "histogram",
    "weft_schedule_seconds": "histogram",
    "weft_build_info": "gauge",
    "weft_speculation_drafts": "counter",
    "weft_speculation_draft_tokens": "counter",
    "weft_speculation_accepted_tokens": "counter",
    "weft_speculation_accepted_per_position": "counter",
    "weft_speculation_depth": "gauge",
    "weft_speculation_foreseen_ratio": "gauge",
    "weft_speculation_pauses": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
}
METERED = {
    "weft_energy_joules": "counter",
    "weft_energy_idle_joules": "counter",
    "weft_energy_request_joules": "counter",
}
"""exposed if a counter is read (test_energy.py)"""
SEEING = {
    "weft_encoder_images": "counter",
    "weft_encoder_tokens": "counter",
    "weft_encoder_seconds": "counter",
    "weft_encoder_cache_queries": "counter",
    "weft_encoder_cache_hits": "counter",
    "weft_encoder_failures": "counter",
    "weft_encoder_cache_used_tokens": "gauge",
    "weft_encoder_cache_capacity_tokens": "gauge",
    "vllm:mm_cache_queries": "counter",
    "vllm:mm_cache_hits": "counter",
}
"""exposed if a model takes images (test_images_live.py)"""
RANKS = {"weft_engine_ranks": "gauge", "weft_rank_last_beat_seconds": "gauge"}
"""exposed if several ranks share a model (test_lifecycle.py)"""
OF_SEVERAL_MODELS = {"weft_model_time_to_first_token_seconds": "histogram"}
"""exposed if there are several models (test_several_models.py)"""


async def samples(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families((await server.http.get("/metrics")).text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def test_names_and_types_are_pinned(server: Server) -> None:
    families = text_string_to_metric_families((await server.http.get("/metrics")).text)
    assert {f.name: f.type for f in families if not f.name.endswith("_created")} == NAMES


async def test_labels_are_pinned(server: Server) -> None:
    await server.complete()
    labels = {name: {key for key, _ in pairs} for name, pairs in await samples(server)}
    assert labels["weft_cache_config_info"] == {"page_size", "num_pages"}
    assert labels["vllm:cache_config_info"] == {"block_size", "num_gpu_blocks"}
    assert labels["weft_prefix_cache_hit_tokens_total"] == {"tier"}
    assert labels["weft_prefix_cache_tokens_by_length_total"] == {"length", "found"}
    assert labels["weft_requests_total"] == {"endpoint", "status"}
    assert labels["weft_finished_total"] == {"reason"}
    assert all(found == {"engine"} for name, found in labels.items() if name.startswith("weft_engine_"))
    of_models = {name: found for name, found in labels.items() if name.startswith("weft_model_")}
    assert of_models.pop("weft_model_state") == {"model_name", "state"}
    assert all("model_name" in found or "wake_seconds" in name for name, found in of_models.items())
    assert labels["weft_requests_queued"] == {"reason"}
    assert labels["weft_max_num_seqs_changes_total"] == {"reason"}
    assert labels["weft_computed_tokens_total"] == {"phase"}
    assert labels["weft_iterations_total"] == {"plan"}
    assert labels["weft_attention_iterations_total"] == {"path"}
    assert labels["weft_attention_cut_iterations_total"] == {"what"}
    assert labels["weft_prompts_cut_total"] == {"by"}
    assert labels["weft_plan_pipelines"] == {"state"}
    assert labels["weft_speculation_draft_tokens_total"] == {"drafter"}
    assert labels["weft_build_info"] == {"version", "model", "dtype", "device"}


async def test_histograms_begin_at_one_millisecond(server: Server) -> None:
    buckets = [
        dict(pairs)["le"] for name, pairs in await samples(server) if name.endswith("first_token_seconds_bucket")
    ]
    assert buckets[0] == "0.001"


async def test_requests_and_latencies_are_counted(server: Server) -> None:
    server.engine.script = Script("abc")
    before = await samples(server)
    await server.complete(n=2)
    await server.post("/v1/completions", {"prompt": ""})
    after = await samples(server)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after.get(key, 0.0) - before.get(key, 0.0)

    assert grown("weft_requests_total", endpoint="/v1/completions", status="200") == 1
    assert grown("weft_requests_total", endpoint="/v1/completions", status="400") == 1
    assert grown("weft_finished_total", reason="stop") == 2
    assert grown("weft_time_to_first_token_seconds_count") == 2
    assert grown("weft_inter_token_latency_seconds_count") == 6
    assert grown("weft_time_per_output_token_seconds_count") == 2
    assert grown("weft_queue_time_seconds_sum") == pytest.approx(0.002)
    assert after["weft_kv_cache_usage_ratio", ()] == 0.25


async def test_unknown_paths_share_one_label(server: Server) -> None:
    for i in range(5):
        await server.http.get(f"/made/up/{i}")
    endpoints = {dict(pairs)["endpoint"] for name, pairs in await samples(server) if name == "weft_requests_total"}
    assert "other" in endpoints
    assert not any("made" in endpoint for endpoint in endpoints)


SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n%b\r\n"


class Raw:
    """A connection on which requests are sent as raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.send = writer.write

    async def answer(self) -> tuple[str, str]:
        """Head, in lower case, and body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.splitlines() if line.startswith("content-length:"))
        return head, (await self._reader.readexactly(int(length.split()[1]))).decode()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Raw]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    async with asyncio.timeout(240):
        yield Raw(reader, writer)
    writer.close()


def scrapes_counted(server: Server) -> float:
    return value_of(server.service.metrics, "weft_requests_total", {"endpoint": "/metrics", "status": "200"}) or 0.0


async def test_a_plain_scrape_bypasses_the_application_and_gives_the_same(server: Server) -> None:
    before = scrapes_counted(server)
    async with connected(server) as raw:
        answers = []
        for header in (b"", b"X-Request-Id: me\r\n", b""):
            raw.send(SCRAPE % header)
            answers.append(await raw.answer())
    heads = [dict(line.split(": ", 1) for line in head.splitlines()[1:] if line) for head, _ in answers]
    assert [head.get("x-request-id") for head in heads] == [None, "me", None]
    assert len({head["content-type"] for head in heads}) == 1
    names = [{line.split()[0] for line in body.splitlines()} for _, body in answers]
    assert names[0] <= names[1] == names[2]
    assert scrapes_counted(server) == before + 3


@pytest.mark.parametrize(
    "request_bytes",
    [
        SCRAPE % b"Origin: http://elsewhere\r\n",
        SCRAPE % b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
        SCRAPE % b"Content-Length: 2\r\n" + b"{}",
        SCRAPE.replace(b"1.1", b"1.0") % b"",
        SCRAPE.replace(b"metrics", b"metrics?x=1") % b"",
        SCRAPE % b"Connection: close\r\n",
    ],
    ids=repr,
)
async def test_other_requests_reach_the_application(server: Server, request_bytes: bytes) -> None:
    async with connected(server) as raw:
        raw.send(request_bytes)
        head, body = await raw.answer()
    assert "200 ok" in head
    assert "x-request-id" in head
    assert "weft_requests_running" in body


async def test_a_scrape_waits_for_the_previous_answer(server: Server) -> None:
    gate = asyncio.Event()
    server.engine.script = Script("abc", gate=gate)
    body = b'{"prompt": "hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with connected(server) as raw:
        raw.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + SCRAPE % b"")
        await server.settle(lambda: len(server.engine.added) == 1)
        gate.set()
        assert "application/json" in (await raw.answer())[0]
        assert "text/plain" in (await raw.answer())[0]


async def test_unread_scrapes_are_not_answered_forever(server: Server) -> None:
    before, count = scrapes_counted(server), 1000
    async with connected(server) as raw:
        raw.send(SCRAPE % b"" * count)
        await raw.answer()
        assert scrapes_counted(server) < before + count
        for _ in range(count - 1):
            await raw.answer()
    assert scrapes_counted(server) == before + count
