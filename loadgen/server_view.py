"""Compares the server's Prometheus counters and histograms before and after a run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_HISTOGRAMS = {
    "ttft": ("weft_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "e2e": ("weft_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    "itl": (
        "weft_inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",  # older versions: measures each gap, despite its name
    ),
    "tpot": ("weft_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    "normalized": ("weft_normalized_latency_seconds",),
    "queue": ("weft_queue_time_seconds", "vllm:request_queue_time_seconds"),
    "prefill": ("weft_prefill_time_seconds", "vllm:request_prefill_time_seconds"),
}
_COUNTERS = {
    "prompt_tokens": ("weft_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "generation_tokens": ("weft_generation_tokens_total", "vllm:generation_tokens_total"),
    "prefix_queried_tokens": ("weft_prefix_cache_queried_tokens_total", "vllm:prefix_cache_queries_total"),
    "prefix_hit_tokens": ("weft_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
    "preemptions": ("weft_preemptions_total", "vllm:num_preemptions_total"),
}
_OPEN = (
    "weft_requests_running", "weft_requests_waiting", "vllm:num_requests_running", "vllm:num_requests_waiting",
)  # fmt: skip
_JOULES = "weft_energy_joules_total"
_BUILD = "weft_build_info"


@dataclass(frozen=True)
class Snapshot:
    """Samples by name, summed over all labels."""

    samples: dict[str, float] = field(default_factory=dict)
    build: dict[str, str] = field(default_factory=dict)  # weft's build info: version, model, dtype, device.

    @staticmethod
    def parse(text: str) -> Snapshot | None:
        """Parse Prometheus text; return None if it is invalid or has no known metric."""
        wanted = {_JOULES, *_OPEN, *(name for names in _COUNTERS.values() for name in names)}
        wanted |= {name + end for names in _HISTOGRAMS.values() for name in names for end in ("_sum", "_count")}
        sums: dict[str, float] = defaultdict(float)
        build: dict[str, str] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == _BUILD:
                        build = dict(sample.labels)
                    if sample.name in wanted:
                        sums[sample.name] += sample.value
        except (ValueError, KeyError, IndexError):
            return None
        return Snapshot(dict(sums), build) if sums else None

    @property
    def idle(self) -> bool:
        """Whether the server had no open request, so that its counters include every answer."""
        return not any(self.samples.get(name) for name in _OPEN)


@dataclass(frozen=True, slots=True)
class ServerView:
    """Changes over a run: `means` in seconds by measure with `counts` of observations, and `totals` by counter."""

    means: dict[str, float]
    counts: dict[str, int]
    totals: dict[str, int]
    joules: float | None = None  # Energy of the server's devices, including idle time; None: not counted.
    seconds: float = 0.0  # Seconds between the two snapshots.
    build: dict[str, str] = field(default_factory=dict)  # See `Snapshot`.


def difference(before: Snapshot, after: Snapshot, seconds: float = 0.0) -> ServerView:
    """Return the changes between two snapshots taken `seconds` apart."""
    means: dict[str, float] = {}
    counts: dict[str, int] = {}
    totals: dict[str, int] = {}

    def grown(name: str) -> float:
        return after.samples[name] - before.samples.get(name, 0.0)

    for measure, names in _HISTOGRAMS.items():
        name = next((n for n in names if f"{n}_count" in after.samples), None)
        if name is not None and (n := grown(f"{name}_count")) > 0:
            means[measure], counts[measure] = grown(f"{name}_sum") / n, int(n)
    for counter, names in _COUNTERS.items():
        name = next((n for n in names if n in after.samples), None)
        if name is not None:
            totals[counter] = int(grown(name))
    joules = grown(_JOULES) if _JOULES in after.samples else None
    return ServerView(means, counts, totals, joules, seconds, after.build)
