"""Counters in shared memory: exposed like those of `prometheus_client`, summed over processes, never falling."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import msgspec
import prometheus_client
import pytest
from exposed import value_of
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from weft import __version__
from weft.engine.wire.messages import (
    DRAFTERS,
    LENGTHS,
    EnergyStats,
    EngineReady,
    EngineStats,
    ImageStats,
    IterationStats,
    LengthHits,
    SchedulerStats,
    SpeculationStats,
    TierStats,
)
from weft.server.observe.counters import Counter, Histogram, Store
from weft.server.observe.engine_metrics import ATTENTION, ATTENTION_PARTS, CUTS, SLOT_LIMIT_REASONS
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState
from weft.server.observe.totals import plus

BOUNDS = (0.001, 0.01, 0.5, 1.0, 16.0)
READY = EngineReady(
    model_type="stub",
    num_parameters=0,
    dtype="float32",
    device="cpu",
    vocab_size=1,
    max_model_len=1,
    page_size=64,
    num_pages=2,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    eos_token_ids=(),
    load_seconds=0.0,
)


def test_exposition_is_that_of_prometheus_client() -> None:
    prometheus_client.disable_created_metrics()
    theirs = prometheus_client.CollectorRegistry()
    histogram = prometheus_client.Histogram("h", "text", ["tier"], buckets=BOUNDS, registry=theirs)
    counter = prometheus_client.Counter("c", "more", ["a", "b"], registry=theirs)
    shared_state = SharedState(3)
    stores = [Store(shared_state, row) for row in range(3)]
    mine = [
        (Histogram(s, "h", "text", BOUNDS, tier=("gpu", "host")), Counter(s, "c", "more", a=("x", "y"), b=("z",)))
        for s in stores
    ]
    rng = random.Random(1)
    # In the order of the labels' values, which is the order of exposition.
    for tier in ("gpu", "host"):
        for _ in range(200):
            value = rng.choice([*BOUNDS, rng.expovariate(1)])
            histogram.labels(tier).observe(value)
            rng.choice(mine)[0].labels(tier).observe(value)
    for a, b in (("x", "z"), ("y", "z")):
        for _ in range(50):
            counter.labels(a, b).inc()
            rng.choice(mine)[1].labels(a, b).inc()

    def parsed(text: str) -> object:
        return [
            (f.name, f.type, f.documentation, s.name, s.labels, pytest.approx(s.value))
            for f in text_string_to_metric_families(text)
            for s in f.samples
        ]

    assert parsed(stores[1].text().decode()) == parsed(generate_latest(theirs).decode())


def test_counters_of_one_label_are_exposed_before_any_event() -> None:
    shared_state = SharedState(1)
    store = Store(shared_state, 0)
    Counter(store, "c", "text", reason=("x", "y"))
    Counter(store, "d", "text")
    Counter(store, "e", "text", a=("x", "y"), b=("z",))
    lines = [line for line in store.text().decode().splitlines() if not line.startswith("#")]
    assert lines == ['c_total{reason="x"} 0.0', 'c_total{reason="y"} 0.0', "d_total 0.0"]


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    name = 'a "model"\\with\nmuch'
    metrics.engines[0].loaded(name, READY)
    labels = {"version": __version__, "model": name, "dtype": "float32", "device": "cpu"}
    assert value_of(metrics, "weft_build_info", labels) == 1


def test_values_outside_a_labels_set_count_as_other() -> None:
    metrics = Metrics()
    metrics.aborted.labels("made up").inc()
    metrics.requests.labels("/made/up", "299").inc()
    value = partial(value_of, metrics)
    assert value("weft_aborted_total", {"cause": "other"}) == 1
    assert value("weft_requests_total", {"endpoint": "other", "status": "other"}) == 1


def test_any_process_exposes_the_sum_and_a_dead_ones_counts_stay() -> None:
    shared_state = SharedState(3)
    pid = os.fork()
    if pid == 0:
        other = Metrics(SharedState(3, fd=shared_state.fd), 2)
        for _ in range(1000):
            other.ttft.observe(0.1)
            other.finished.labels("stop").inc()
        os._exit(9)
    mine = Metrics(shared_state, 1)
    for _ in range(10):
        mine.finished.labels("stop").inc()
    os.waitpid(pid, 0)
    again = Metrics(shared_state, 2)  # the dead process's successor continues from its counts
    again.finished.labels("stop").inc()
    for metrics in (mine, again, Metrics(shared_state, 0)):
        assert value_of(metrics, "weft_finished_total", {"reason": "stop"}) == 1011
        assert value_of(metrics, "weft_time_to_first_token_seconds_count") == 1000


def test_a_scrape_exposes_the_changes_since_the_last_one() -> None:
    shared_state = SharedState(2)
    metrics, other = Metrics(shared_state, 0), Metrics(shared_state, 1)
    for n in range(1, 4):
        other.aborted.labels("drain").inc()
        metrics.ttft.observe(0.2)
        metrics.engines[0].update(EngineStats(scheduler=SchedulerStats(running=n)))
        assert metrics.render() == metrics.render()
        assert value_of(metrics, "weft_aborted_total", {"cause": "drain"}) == n
        assert value_of(metrics, "weft_time_to_first_token_seconds_count") == n
        assert value_of(metrics, "weft_requests_running") == n
    metrics.engines[0].loaded("stub", READY)
    assert value_of(metrics, "weft_engine_up", {"engine": "0"}) == 1
    metrics.engines[0].died()
    assert value_of(metrics, "weft_engine_up", {"engine": "0"}) == 0


def test_iterations_count_once() -> None:
    metrics = Metrics()
    for iterations in (1, 1, 2):  # the second brings aborts
        last = IterationStats(tokens=5)
        stats = EngineStats(iterations=iterations, iteration=last, load_seconds=[("ssd", 0.01)])
        metrics.engines[0].update(stats)
        metrics.count_iteration(stats)
    value = partial(value_of, metrics)
    assert value("weft_iteration_tokens_count") == 2
    assert value("weft_iteration_tokens_sum") == 10
    assert value("weft_kv_load_seconds_count", {"tier": "ssd"}) == 3


def test_more_cells_than_slots_are_refused() -> None:
    store = Store(SharedState(1), 0)
    with pytest.raises(ValueError, match="cells"):
        Counter(store, "c", "text", a=[str(i) for i in range(5000)])


def test_totals_continue_from_those_of_the_last_engine() -> None:
    def stats(tokens: int, **tiers: TierStats) -> EngineStats:
        scheduler = SchedulerStats(running=tokens, prompt_tokens=tokens, decode_tokens=tokens, tiers=tiers)
        return EngineStats(scheduler=scheduler, iterations=tokens, iterations_idle_seconds=tokens / 2)

    metrics = Metrics()
    metrics.engines[0].update(stats(5, gpu=TierStats(used=7, hit_tokens=3)))
    metrics.engines[0].started(plus(EngineStats(), stats(5, gpu=TierStats(used=7, hit_tokens=3))))
    names = ("weft_prompt_tokens_total", "weft_device_idle_seconds_total", "weft_requests_running")
    assert [value_of(metrics, name) for name in names] == [5, 2.5, 0]
    for name, value in (("weft_prefix_cache_hit_tokens_total", 3), ("weft_kv_tier_used_pages", 0)):
        assert value_of(metrics, name, {"tier": "gpu"}) == value
    metrics.engines[0].update(stats(2, gpu=TierStats(used=1, hit_tokens=1), host=TierStats(bytes_in=9)))
    assert [value_of(metrics, name) for name in names] == [7, 3.5, 2]
    for name, tier, value in (
        ("weft_prefix_cache_hit_tokens_total", "gpu", 4),
        ("weft_kv_tier_used_pages", "gpu", 1),
        ("weft_kv_tier_bytes_in_total", "host", 9),
    ):
        assert value_of(metrics, name, {"tier": tier}) == value


def test_every_total_of_the_engine_continues() -> None:
    """A counter that `totals` does not list would fall."""

    def ones(kind: type[Any], **more: Any) -> Any:
        plain = {f.name: 1 for f in msgspec.structs.fields(kind) if f.type in (int, float)}
        return kind(**{**plain, **more})

    scheduler = ones(
        SchedulerStats,
        tiers={"gpu": ones(TierStats)},
        slot_limit_changes=dict.fromkeys(SLOT_LIMIT_REASONS, 1),
        chunks_cut=dict.fromkeys(CUTS, 1),
        attention=dict.fromkeys((*ATTENTION, *ATTENTION_PARTS), 1),
        prefix_lengths={name: ones(LengthHits) for name in (*LENGTHS, "more")},
    )
    by_drafter = dict.fromkeys(DRAFTERS, 1)
    speculation = ones(
        SpeculationStats, draft_tokens=by_drafter, accepted_tokens=by_drafter, accepted_by_position={"0": 1}
    )
    stats = ones(
        EngineStats, scheduler=scheduler, energy=ones(EnergyStats), images=ones(ImageStats), speculation=speculation
    )

    def counts(*predecessors: EngineStats) -> list[float]:
        metrics = Metrics()
        for before in predecessors:
            metrics.engines[0].started(before)
        metrics.engines[0].update(stats)
        families = text_string_to_metric_families(metrics._engine_metrics.text([False]).decode())
        samples = [sample for family in families if family.type == "counter" for sample in family.samples]
        return [sample.value for sample in samples if sample.labels.get("plan") != "serial"]

    assert min(counts()) > 0
    assert counts(stats) == [2 * count for count in counts()]
    assert len(counts()) > 80


def test_the_slot_limit_is_exposed_before_the_first_request_and_removed_with_the_engine() -> None:
    metrics = Metrics()
    engine = metrics.engines[0]
    reported = []
    engine.loaded("m", msgspec.structs.replace(READY, slot_limit=16))
    reported.append(metrics._engine_metrics.text([False]))
    engine.update(EngineStats(scheduler=SchedulerStats(slot_limit=24)))
    reported.append(metrics._engine_metrics.text([False]))
    engine.died()
    reported.append(metrics._engine_metrics.text([False]))
    assert [b"weft_max_num_seqs_now 16.0" in reported[0], b"weft_max_num_seqs_now 24.0" in reported[1]] == [True, True]
    assert b"weft_max_num_seqs_now 0.0" in reported[2]
