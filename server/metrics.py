"""What Prometheus sees. Names and labels are an API, pinned by a test; label values are fixed sets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from weft import __version__
from weft.engine.messages import EngineReady, EngineStats, Started

CONTENT_TYPE = CONTENT_TYPE_LATEST
LAG_INTERVAL = 0.5

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)
_CPU = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SIZE = tuple(float(2**i) for i in range(17))


class Metrics:
    """The metrics of one daemon, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"weft_{name}", help, buckets=buckets, registry=registry)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"weft_{name}", help, labels, registry=registry)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _LATENCY)
        self.itl = histogram("inter_token_latency_seconds", "Gap between consecutive deliveries of tokens", _GAP)
        self.tpot = histogram("time_per_output_token_seconds", "(Latency - TTFT) / (output tokens - 1)", _GAP)
        self.latency = histogram("request_latency_seconds", "Arrival to last token", _LATENCY)
        self.normalized = histogram("normalized_latency_seconds", "Latency / output tokens", _GAP)
        self.queue_time = histogram("queue_time_seconds", "Arrival in the engine to first schedule", _LATENCY)
        self.prefill_time = histogram("prefill_time_seconds", "First schedule to first token", _LATENCY)
        self.decode_time = histogram("decode_time_seconds", "First token to last token", _LATENCY)
        self.iteration_tokens = histogram("iteration_tokens", "Tokens in an iteration", _SIZE)
        self.iteration_seconds = histogram("iteration_seconds", "Duration of an iteration", _GAP)
        self.batch_requests = histogram("batch_requests", "Requests in an iteration", _SIZE[:13])
        self.schedule_seconds = histogram("schedule_seconds", "CPU time of schedule and commit per iteration", _CPU)
        self.event_loop_lag = histogram("event_loop_lag_seconds", "Lateness of a timer in the API process", _CPU)
        self.requests = counter("requests", "HTTP requests answered", "endpoint", "status")
        self.finished = counter("finished", "Sequences that ended", "reason")
        self.rejected = counter("rejected", "Requests refused before any work", "reason")
        self.aborted = counter("aborted", "Sequences ended before they finished", "cause")
        self.build_info = Gauge(
            "weft_build_info", "Always 1", ("version", "model", "dtype", "device"), registry=registry
        )
        self._engine = _EngineCollector()
        registry.register(self._engine)
        self._iterations = 0

    def engine_loaded(self, model: str, ready: EngineReady) -> None:
        self._engine.ready = ready
        self._engine.up = True
        self.build_info.labels(__version__, model, ready.dtype, ready.device).set(1)

    def engine_died(self) -> None:
        self._engine.up = False

    def engine_stats(self, stats: EngineStats) -> None:
        """Called once for every message of the engine."""
        self._engine.stats = stats
        if stats.iterations == self._iterations:
            return  # brought aborts, no iteration
        self._iterations = stats.iterations
        self.iteration_tokens.observe(stats.iteration_tokens)
        self.iteration_seconds.observe(stats.iteration_seconds)
        self.batch_requests.observe(stats.iteration_requests)
        self.schedule_seconds.observe(stats.schedule_seconds)

    def sequence_started(self, started: Started, ttft: float) -> None:
        self.ttft.observe(ttft)
        self.queue_time.observe(started.queue_seconds)
        self.prefill_time.observe(started.prefill_seconds)

    def sequence_finished(self, reason: str, *, ttft: float, latency: float, num_tokens: int) -> None:
        self.finished.labels(reason).inc()
        self.latency.observe(latency)
        self.decode_time.observe(latency - ttft)
        if num_tokens:
            self.normalized.observe(latency / num_tokens)
        if num_tokens > 1:
            self.tpot.observe((latency - ttft) / (num_tokens - 1))

    def sequence_aborted(self, cause: str) -> None:
        self.finished.labels("abort").inc()
        self.aborted.labels(cause).inc()

    async def watch_event_loop(self) -> None:
        """Measure for ever how late the loop's timers are."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.event_loop_lag.observe(max(0.0, loop.time() - due))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Gauges and totals that the engine keeps itself, under weft's names and those that routers look for."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.ready: EngineReady | None = None
        self.up = False

    def collect(self) -> Iterable[Metric]:
        stats, ready = self.stats, self.ready
        usage = stats.pages_held / stats.pages_total if stats.pages_total else 0.0

        def gauge(name: str, help: str, value: float) -> Metric:
            return GaugeMetricFamily(name, help, value=value)

        def counter(name: str, help: str, value: float) -> Metric:
            return CounterMetricFamily(name, help, value=value)

        def info(name: str, help: str, labels: dict[str, str]) -> Metric:
            family = GaugeMetricFamily(name, help, labels=list(labels))
            family.add_metric(list(labels.values()), 1)
            return family

        yield gauge("weft_engine_up", "1 while the engine lives and its model is loaded", float(self.up))
        yield gauge("weft_requests_running", "Sequences running", stats.running)
        yield gauge("weft_requests_waiting", "Sequences waiting", stats.waiting)
        yield gauge("weft_kv_cache_usage_ratio", "KV pages held / all", usage)
        yield counter("weft_prefix_cache_queried_tokens", "Prompt tokens looked up", stats.prefix_queried_tokens)
        hits = CounterMetricFamily("weft_prefix_cache_hit_tokens", "Prompt tokens found", labels=["tier"])
        hits.add_metric(["gpu"], stats.prefix_hit_tokens)
        yield hits
        yield counter("weft_prompt_tokens", "Prompt tokens of started requests", stats.prompt_tokens)
        yield counter("weft_generation_tokens", "Tokens generated", stats.generation_tokens)
        yield counter("weft_preemptions", "Requests that lost their pages", stats.preemptions)

        yield gauge("vllm:num_requests_running", "weft_requests_running", stats.running)
        yield gauge("vllm:num_requests_waiting", "weft_requests_waiting", stats.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "weft_kv_cache_usage_ratio", usage)
        yield counter("vllm:prefix_cache_queries", "weft_prefix_cache_queried_tokens", stats.prefix_queried_tokens)
        yield counter("vllm:prefix_cache_hits", "weft_prefix_cache_hit_tokens", stats.prefix_hit_tokens)
        yield counter("vllm:num_preemptions", "weft_preemptions", stats.preemptions)
        if ready is not None:
            page_size, num_pages = str(ready.page_size), str(ready.num_pages)
            yield info("weft_cache_config_info", "KV pages", {"page_size": page_size, "num_pages": num_pages})
            labels = {"block_size": page_size, "num_gpu_blocks": num_pages}
            yield info("vllm:cache_config_info", "weft_cache_config_info", labels)
