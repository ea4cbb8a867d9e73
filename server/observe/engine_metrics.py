"""Metrics that engines report, under weft's names and the vLLM names that routers use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from weft import __version__
from weft.engine.wire.messages import (
    DRAFTERS,
    LENGTHS,
    EnergyStats,
    EngineReady,
    EngineStats,
    ImageStats,
    LengthHits,
    PlanStats,
    SchedulerStats,
    SpeculationStats,
    TierStats,
)
from weft.server.observe.exposition import family, head, labelled
from weft.server.observe.totals import plus, summed

TIERS = ("gpu", "host", "ssd")
SLOT_LIMIT_REASONS = ("room", "late", "shift", "worse", "out_of_reach")
"""Reasons for changes of the limit by --max-num-seqs auto (docs/advisor.md)."""
CUTS = ("slo", "least", "waited")
"""Limits that decide how --itl-slo cuts prefill (`engine.scheduling.chunk_limit.BOUNDS`)."""
ATTENTION = ("decodes", "chunks", "serial", "pod", "pod_in_turn", "pod_tiles", "pod_together", "pipeline")
ATTENTION_PARTS = ("split_decodes", "cut_chunks")  # Attention paths and split work.
_QUEUE = ("slots", "pages", "tokens", "sibling", "grammar", "load", "adapter", "encoder")

_TIER_COUNTERS = (
    ("weft_prefix_cache_hit_tokens", "hit_tokens", "Prompt tokens found in a tier and in no faster one"),
    ("weft_prefix_cache_missed_tokens", "missed_tokens", "Prompt tokens found neither in a tier nor in a faster one"),
    ("weft_kv_tier_bytes_in", "bytes_in", "KV bytes stored in a tier"),
    ("weft_kv_tier_bytes_out", "bytes_out", "KV bytes loaded from a tier"),
    ("weft_kv_tier_bytes_saved", "bytes_saved", "KV bytes saved by packing"),
    ("weft_kv_tier_raw_pages", "raw_pages", "KV pages stored raw because they could not be packed"),
    ("weft_kv_tier_evictions", "evictions", "KV pages evicted from a tier"),
    ("weft_kv_tier_idle_spilled_pages", "spilled", "Idle KV pages copied to a tier in the background"),
    ("weft_kv_tier_prefetched_pages", "prefetched", "KV pages loaded from a tier before their request could run"),
    ("weft_kv_tier_failures", "failures", "KV pages that could not be stored or loaded"),
)
_TIER_GAUGES = (
    ("weft_kv_tier_used_pages", "used", "KV pages in a tier"),
    ("weft_kv_tier_capacity_pages", "capacity", "Capacity of a tier in KV pages"),
    ("weft_kv_tier_up", "up", "1 while a tier works, 0 after a failure switched it off"),
)


def _images(stats: ImageStats) -> Iterable[str]:
    """Yield the metrics of vision towers, also under vLLM's names."""
    yield _counter("weft_encoder_images", "Images encoded", stats.encoded)
    yield _counter("weft_encoder_tokens", "Embeddings computed for images", stats.tokens)
    yield _counter("weft_encoder_seconds", "Device seconds for the embeddings of images", stats.seconds)
    yield _counter("weft_encoder_cache_queries", "Images that prompts needed, outside cached prefixes", stats.queries)
    yield _counter("weft_encoder_cache_hits", "Images whose embeddings were cached", stats.hits)
    yield _counter("weft_encoder_failures", "Images that could not be encoded", stats.failures)
    yield _gauge("weft_encoder_cache_used_tokens", "Embeddings in the cache", stats.rows)
    yield _gauge("weft_encoder_cache_capacity_tokens", "Embeddings that fit the cache", stats.capacity)
    yield _counter("vllm:mm_cache_queries", "weft_encoder_cache_queries_total", stats.queries)
    yield _counter("vllm:mm_cache_hits", "weft_encoder_cache_hits_total", stats.hits)


class EngineFigures:
    """The last statistics of an engine."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.before = EngineStats()  # Totals of its predecessors.
        self.ready: EngineReady | None = None
        self.model = ""
        self.up = False
        self.updated = 0.0  # Unix time of the last report of an engine with LoRA adapters.

    def started(self, before: EngineStats) -> None:
        """Reset for a new process. `before`: totals of its predecessors."""
        self.before, self.stats = before, EngineStats()

    def loaded(self, model: str, ready: EngineReady) -> None:
        self.model, self.ready, self.up = model, ready, True
        self.stats = replace(self.stats, plan=ready.plan)

    def update(self, stats: EngineStats) -> None:
        """Update the gauges. Called for every message of the engine, in every process that serves /metrics."""
        self.stats = stats
        if stats.adapters.most:
            self.updated = time.time()

    def died(self) -> None:
        self.up = False
        self.stats = plus(self.stats, EngineStats())  # nothing runs or waits any more; counters stay


class EngineMetrics:
    """Metrics of all engines together, and per engine under names that start with `weft_engine_`."""

    def __init__(self, count: int) -> None:
        self.engines = [EngineFigures() for _ in range(count)]
        self._shown: tuple[object, bytes] = (None, b"")  # Inputs of the last `text`, and its result.

    def text(self, late: Sequence[bool]) -> bytes:
        """Return the metrics in Prometheus's text format. `late`: whether each engine makes no progress."""
        ups = [engine.up and not slow for engine, slow in zip(self.engines, late, strict=True)]
        inputs = [(e.stats, e.before, e.ready, e.model, up) for e, up in zip(self.engines, ups, strict=True)]
        if inputs != self._shown[0]:
            self._shown = (inputs, "".join([*self._of_each(ups), *self._of_all()]).encode())
        return self._shown[1]

    def together(self, engines: Iterable[int]) -> SchedulerStats:
        """Return the scheduler statistics of these engines together."""
        return summed([plus(self.engines[i].before, self.engines[i].stats) for i in engines]).scheduler

    @property
    def plan(self) -> PlanStats:
        return summed([engine.stats for engine in self.engines]).plan

    def _of_each(self, ups: Sequence[bool]) -> Iterable[str]:
        each = [plus(engine.before, engine.stats).scheduler for engine in self.engines]

        def of_engines(name: str, kind: str, help: str, values: Iterable[float]) -> str:
            figures = {str(i): value for i, value in enumerate(values)}
            return family(f"weft_engine_{name}", kind, help, "engine", figures)

        yield of_engines("up", "gauge", "1 while the engine makes progress and its model is loaded", ups)
        yield of_engines("requests_running", "gauge", "Sequences running there", [s.running for s in each])
        yield of_engines("requests_waiting", "gauge", "Sequences waiting there", [s.waiting for s in each])
        yield of_engines("kv_cache_usage_ratio", "gauge", "Its KV pages held / all", [_usage(s) for s in each])
        for name, help in (
            ("prompt_tokens", "Prompt tokens of requests it started"),
            ("generation_tokens", "Tokens it generated"),
            ("prefix_queried_tokens", "Prompt tokens it looked up"),
            ("prefix_hit_tokens", "Prompt tokens it found in its tiers"),
        ):
            yield of_engines(f"{name}_total", "counter", help, [getattr(s, name) for s in each])

    def _of_all(self) -> Iterable[str]:
        engine = summed([plus(engine.before, engine.stats) for engine in self.engines])
        stats = engine.scheduler
        hits, queried = "weft_prefix_cache_hit_tokens_total", "weft_prefix_cache_queried_tokens"
        usage = _usage(stats)
        queue = {reason: stats.queue.get(reason, 0) for reason in _QUEUE}
        yield _gauge("weft_requests_running", "Sequences running", stats.running)
        yield _gauge("weft_requests_waiting", "Sequences waiting", stats.waiting)
        yield _gauge("weft_max_num_seqs_now", "Sequences that may run at once now", self._sequence_limit())
        changed = "Changes of that number by --max-num-seqs auto, by reason"
        changes = {reason: stats.slot_limit_changes.get(reason, 0) for reason in SLOT_LIMIT_REASONS}
        yield family("weft_max_num_seqs_changes_total", "counter", changed, "reason", changes)
        yield family("weft_requests_queued", "gauge", "Waiting sequences by what they wait for", "reason", queue)
        yield _gauge("weft_kv_cache_usage_ratio", "KV pages held / all", usage)
        yield _counter(queried, "Prompt tokens looked up", stats.prefix_queried_tokens)
        yield from self._tiers(stats)
        yield _by_length(stats)
        lost = "Prompt tokens whose K and V were found, without a recurrent state to continue from"
        yield _counter("weft_prefix_cache_stateless_tokens", lost, stats.prefix_stateless_tokens)
        saved = {tier: stats.state_checkpoints.get(tier, 0) for tier in stats.tiers or ("gpu",)}
        yield family("weft_state_checkpoints", "gauge", "Recurrent states saved for prefixes", "tier", saved)
        yield _gauge("weft_state_bytes", "Device memory of recurrent states in bytes", stats.state_bytes)
        yield _gauge("weft_pinned_pages", "Retained KV pages, which are evicted last", stats.retained_pages)
        lost = "Retained KV pages displaced by other retained pages"
        yield _counter("weft_pins_displaced", lost, stats.retentions_displaced)
        yield _counter("weft_prompt_tokens", "Prompt tokens of started requests", stats.prompt_tokens)
        yield _counter("weft_generation_tokens", "Tokens generated", stats.generation_tokens)
        yield _counter("weft_preemptions", "Requests that lost their pages", stats.preemptions)
        lost = "Requests ended by non-finite logits (NaN or inf)"
        yield _counter("weft_nonfinite_logits", lost, stats.nonfinite_logits)
        yield _counter("weft_displaced", "Preemptions that gave a slot to a higher priority", stats.displaced)
        yield _counter("weft_yielded", "Preemptions that gave a slot to an API key without one", stats.yielded)
        yield _counter("weft_overtaken", "Requests that overtook one that lacked pages or a slot", stats.overtaken)
        cut = "Iterations with prefill cut by --itl-slo, by the deciding limit"
        cuts = {by: stats.chunks_cut.get(by, 0) for by in CUTS}
        yield family("weft_prompts_cut_total", "counter", cut, "by", cuts)
        late = "Iterations cut by --itl-slo that still exceeded the limit"
        yield _counter("weft_itl_slo_late", late, stats.chunks_late)
        computed = {"decode": stats.decode_tokens, "prefill": stats.prefill_tokens}
        yield family("weft_computed_tokens_total", "counter", "Tokens computed by the model", "phase", computed)
        pipelined = engine.iterations_pipelined
        plans = {"serial": engine.iterations - pipelined, "pipelined": pipelined}
        yield family("weft_iterations_total", "counter", "Iterations by plan", "plan", plans)
        for name, help, label, values in (
            ("weft_attention_iterations", "Iterations by attention path", "path", ATTENTION),
            ("weft_attention_cut_iterations", "Iterations with split attention", "what", ATTENTION_PARTS),
        ):
            figures = {value: stats.attention.get(value, 0) for value in values}
            yield family(f"{name}_total", "counter", help, label, figures)
        plan = engine.plan
        left = plan.pipelines - plan.serving - plan.left_out
        pipelines = {"serving": plan.serving, "preparing": left, "left_out": plan.left_out}
        yield family("weft_plan_pipelines", "gauge", "Pipelines of the plan by state", "state", pipelines)
        idle = "Device idle between iterations while requests were open"
        yield _counter("weft_device_idle_seconds", idle, engine.iterations_idle_seconds)
        yield from self._energy(engine.energy)
        if engine.images is not None:
            yield from _images(engine.images)
        yield from _speculation(engine.speculation)

        yield _gauge("vllm:num_requests_running", "weft_requests_running", stats.running)
        yield _gauge("vllm:num_requests_waiting", "weft_requests_waiting", stats.waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "weft_kv_cache_usage_ratio", usage)
        yield _counter("vllm:prefix_cache_queries", f"{queried}_total", stats.prefix_queried_tokens)
        yield _counter("vllm:prefix_cache_hits", hits, stats.prefix_hit_tokens)
        yield _counter("vllm:num_preemptions", "weft_preemptions_total", stats.preemptions)
        yield from self._adapters()
        yield from self._constants()

    def _adapters(self) -> Iterable[str]:
        """Yield vLLM's gauge of LoRA adapters, whose value is the time of the last report."""
        known = [engine for engine in self.engines if engine.stats.adapters.most]
        if not known:
            return
        states = [engine.stats.adapters for engine in known]
        labels = {
            "max_lora": str(max(state.most for state in states)),
            "running_lora_adapters": ",".join(sorted({name for state in states for name in state.running})),
            "waiting_lora_adapters": ",".join(sorted({name for state in states for name in state.waiting})),
        }
        name = "vllm:lora_requests_info"
        updated = max(engine.updated for engine in known)
        yield f"{head(name, 'gauge', 'LoRA adapters that requests use')}{name}{labelled(labels)} {updated}\n"

    def _sequence_limit(self) -> int:
        """Return the current sequence limit. An engine without statistics has its initial limit."""
        up = [engine for engine in self.engines if engine.up and engine.ready is not None]
        return sum(e.stats.scheduler.slot_limit or (e.ready.slot_limit if e.ready is not None else 0) for e in up)

    def _energy(self, energy: EnergyStats | None) -> Iterable[str]:
        if energy is None:
            return
        device = next((engine.ready.device for engine in self.engines if engine.ready is not None), "")
        labels = {"device": device, "source": energy.source}
        for name, help, joules in (
            ("weft_energy_joules", "Energy drawn by the device since the engine started", energy.joules),
            ("weft_energy_idle_joules", "Energy drawn while no request was open", energy.idle_joules),
            ("weft_energy_request_joules", "Energy charged to requests", energy.charged),
        ):
            yield f"{head(f'{name}_total', 'counter', help)}{name}_total{labelled(labels)} {joules}\n"

    def _tiers(self, stats: SchedulerStats) -> Iterable[str]:
        tiers = stats.tiers or {"gpu": TierStats()}
        for name, field, help in _TIER_COUNTERS:
            figures = {tier: getattr(stats, field) for tier, stats in tiers.items()}
            yield family(f"{name}_total", "counter", help, "tier", figures)
        for name, field, help in _TIER_GAUGES:
            figures = {tier: getattr(stats, field) for tier, stats in tiers.items()}
            yield family(name, "gauge", help, "tier", figures)

    def _constants(self) -> Iterable[str]:
        known = [engine for engine in self.engines if engine.ready is not None]
        readies = [engine.ready for engine in known if engine.ready is not None]
        if not readies:
            return
        ready, sequences, pages = readies[0], sum(r.max_num_seqs for r in readies), sum(r.num_pages for r in readies)
        yield _gauge("weft_max_running_requests", "Maximum running sequences", sequences)
        yield _gauge(
            "weft_max_iteration_tokens",
            "Maximum tokens per iteration, prompts and decodes together",
            ready.max_num_batched_tokens,
        )
        page_size, num_pages = str(ready.page_size), str(pages)
        yield _info("weft_cache_config_info", "KV pages", {"page_size": page_size, "num_pages": num_pages})
        labels = {"block_size": page_size, "num_gpu_blocks": num_pages}
        yield _info("vllm:cache_config_info", "weft_cache_config_info", labels)
        labels = {"version": __version__, "model": known[0].model, "dtype": ready.dtype, "device": ready.device}
        yield _info("weft_build_info", "Always 1", labels)


def _speculation(stats: SpeculationStats) -> Iterable[str]:
    drafted = {drafter: stats.draft_tokens.get(drafter, 0) for drafter in DRAFTERS}
    accepted = {drafter: stats.accepted_tokens.get(drafter, 0) for drafter in DRAFTERS}
    own = sum(accepted[drafter] for drafter in DRAFTERS if drafter != "grammar")
    places = dict(sorted(stats.accepted_by_position.items(), key=lambda place: int(place[0])))
    drafts, by_place = "weft_speculation_drafts", "weft_speculation_accepted_per_position_total"
    tokens, right = "weft_speculation_draft_tokens_total", "weft_speculation_accepted_tokens_total"
    yield _counter(drafts, "Drafts verified, one for each request and iteration that had one", stats.drafts)
    yield family(tokens, "counter", "Draft tokens verified, by their source", "drafter", drafted)
    yield family(right, "counter", "Draft tokens accepted, by their source", "drafter", accepted)
    yield family(by_place, "counter", "Draft tokens accepted, by their place in the draft", "position", places)
    depth = stats.last_draft_tokens / stats.last_requests if stats.last_requests else 0.0
    yield _gauge("weft_speculation_depth", "Draft tokens per decoding request in the last iteration", depth)
    foreseen = stats.foreseen_tokens / own if own else 1.0
    yield _gauge("weft_speculation_foreseen_ratio", "Accepted tokens that were expected / those accepted", foreseen)
    yield _counter("weft_speculation_pauses", "Times that drafts stopped because they did not pay", stats.pauses)
    yield _counter("vllm:spec_decode_num_drafts", f"{drafts}_total", stats.drafts)
    yield _counter("vllm:spec_decode_num_draft_tokens", tokens, sum(drafted.values()))
    yield _counter("vllm:spec_decode_num_accepted_tokens", right, sum(accepted.values()))
    yield family("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", by_place, "position", places)


def _usage(stats: SchedulerStats) -> float:
    return stats.pages_held / stats.pages_total if stats.pages_total else 0.0


def _gauge(name: str, help: str, value: float) -> str:
    return f"{head(name, 'gauge', help)}{name} {float(value)}\n"


def _counter(name: str, help: str, value: float) -> str:
    name = f"{name}_total"
    return f"{head(name, 'counter', help)}{name} {float(value)}\n"


def _by_length(stats: SchedulerStats) -> str:
    name = "weft_prefix_cache_tokens_by_length_total"
    lines = [head(name, "counter", "Prompt tokens looked up, by prompt length and tier")]
    for length in (*LENGTHS, "more"):
        of = stats.prefix_lengths.get(length, LengthHits())
        for found in (*TIERS, "missed"):
            lines.append(f"{name}{labelled({'length': length, 'found': found})} {float(getattr(of, found))}\n")
    return "".join(lines)


def _info(name: str, help: str, labels: dict[str, str]) -> str:
    return f"{head(name, 'gauge', help)}{name}{labelled(labels)} 1.0\n"
