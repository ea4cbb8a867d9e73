"""Metric names are an API: a rename empties every dashboard."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stub import Script, Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = {
    "weft_requests_running": "gauge",
    "weft_requests_waiting": "gauge",
    "weft_requests_queued": "gauge",
    "weft_max_running_requests": "gauge",
    "weft_max_iteration_tokens": "gauge",
    "weft_kv_cache_usage_ratio": "gauge",
    "weft_cache_config_info": "gauge",
    "weft_prefix_cache_queried_tokens": "counter",
    "weft_prefix_cache_hit_tokens": "counter",
    "weft_prefix_cache_missed_tokens": "counter",
    "weft_kv_tier_bytes_in": "counter",
    "weft_kv_tier_bytes_out": "counter",
    "weft_kv_tier_evictions": "counter",
    "weft_kv_tier_failures": "counter",
    "weft_kv_tier_used_pages": "gauge",
    "weft_kv_tier_capacity_pages": "gauge",
    "weft_kv_tier_up": "gauge",
    "weft_kv_load_seconds": "histogram",
    "weft_time_to_first_token_seconds": "histogram",
    "weft_inter_token_latency_seconds": "histogram",
    "weft_time_per_output_token_seconds": "histogram",
    "weft_request_latency_seconds": "histogram",
    "weft_normalized_latency_seconds": "histogram",
    "weft_queue_time_seconds": "histogram",
    "weft_prefill_time_seconds": "histogram",
    "weft_decode_time_seconds": "histogram",
    "weft_prompt_tokens": "counter",
    "weft_generation_tokens": "counter",
    "weft_computed_tokens": "counter",
    "weft_iterations": "counter",
    "weft_device_idle_seconds": "counter",
    "weft_iteration_tokens": "histogram",
    "weft_iteration_seconds": "histogram",
    "weft_batch_requests": "histogram",
    "weft_preemptions": "counter",
    "weft_requests": "counter",
    "weft_finished": "counter",
    "weft_rejected": "counter",
    "weft_aborted": "counter",
    "weft_engine_restarts": "counter",
    "weft_api_process_restarts": "counter",
    "weft_engine_up": "gauge",
    "weft_event_loop_lag_seconds": "histogram",
    "weft_schedule_seconds": "histogram",
    "weft_build_info": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
}


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
    assert labels["weft_requests_total"] == {"endpoint", "status"}
    assert labels["weft_finished_total"] == {"reason"}
    assert labels["weft_requests_queued"] == {"reason"}
    assert labels["weft_computed_tokens_total"] == {"phase"}
    assert labels["weft_iterations_total"] == {"plan"}
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
