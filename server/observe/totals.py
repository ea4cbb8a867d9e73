"""Totals of engines: counters continue across restarts, and several engines are summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from weft.engine.wire.messages import EnergyStats, EngineStats, ImageStats, LengthHits, SpeculationStats, TierStats

Stats = TypeVar("Stats", bound=Struct)

_ENGINE = ("iterations", "iterations_pipelined", "iterations_idle_seconds")
_SCHEDULER = (
    "prefix_queried_tokens", "prefix_hit_tokens", "prefix_stateless_tokens", "retentions_displaced", "preemptions",
    "prompt_tokens", "generation_tokens", "decode_tokens", "prefill_tokens", "nonfinite_logits", "displaced", "yielded",
    "overtaken", "chunks_late",
)  # fmt: skip
_ENERGY = ("joules", "idle_joules", "charged")
_IMAGES = ("encoded", "tokens", "seconds", "queries", "hits", "failures")
_TIER = (
    "hit_tokens", "missed_tokens", "bytes_in", "bytes_out", "bytes_saved", "raw_pages", "evictions", "spilled",
    "prefetched", "failures",
)  # fmt: skip
_SPECULATION = ("drafts", "foreseen_tokens", "pauses")
_LENGTH = ("gpu", "host", "ssd", "missed")


def plus(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with its totals increased by those of its predecessors."""
    tiers = now.scheduler.tiers
    for name, tier in before.scheduler.tiers.items():
        # For a tier that this engine has not reported yet, keep the totals but not the contents.
        tiers = {**tiers, name: _raised(tiers.get(name, TierStats()), tier, _TIER)}
    lengths = now.scheduler.prefix_lengths
    for name, of in before.scheduler.prefix_lengths.items():
        lengths = {**lengths, name: _raised(lengths.get(name, LengthHits()), of, _LENGTH)}
    counted = {
        name: _counts(getattr(now.scheduler, name), getattr(before.scheduler, name))
        for name in ("slot_limit_changes", "chunks_cut", "attention")
    }
    scheduler = replace(
        _raised(now.scheduler, before.scheduler, _SCHEDULER), tiers=tiers, prefix_lengths=lengths, **counted
    )
    energy = now.energy
    if before.energy is not None:
        source = energy or EnergyStats(source=before.energy.source)
        energy = _raised(source, before.energy, _ENERGY)
    images = now.images
    if before.images is not None:
        images = _raised(images or ImageStats(), before.images, _IMAGES)
    drafted = _raised(now.speculation, before.speculation, _SPECULATION)
    by = ("draft_tokens", "accepted_tokens", "accepted_by_position")
    drafted = replace(
        drafted, **{name: _counts(getattr(drafted, name), getattr(before.speculation, name)) for name in by}
    )
    return replace(
        _raised(now, before, _ENGINE), scheduler=scheduler, energy=energy, images=images, speculation=drafted
    )


def _counts(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {**now, **{name: now.get(name, 0) + count for name, count in before.items()}}


def _raised(now: Stats, before: Stats, names: tuple[str, ...]) -> Stats:
    return replace(now, **{name: getattr(now, name) + getattr(before, name) for name in names})


def summed(engines: Sequence[EngineStats]) -> EngineStats:
    """Sum counters and gauges of several engines, without the last iteration. A tier is up if it is up in all."""
    named = {name: sum(getattr(engine, name) for engine in engines) for name in (*_ENGINE, "log_lines_dropped")}
    seeing = [engine.images for engine in engines if engine.images is not None]
    metered = [engine.energy for engine in engines if engine.energy is not None]
    return EngineStats(
        scheduler=reduce(_added, [engine.scheduler for engine in engines]),
        plan=reduce(_added, [engine.plan for engine in engines]),
        images=reduce(_added, seeing) if seeing else None,
        speculation=reduce(_added, [engine.speculation for engine in engines], SpeculationStats()),
        energy=reduce(lambda one, other: _raised(one, other, _ENERGY), metered) if metered else None,
        **named,
    )


def _added(one: Stats, other: Stats) -> Stats:
    fields: dict[str, Any] = {}
    for name in one.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, dict):
            fields[name] = {**mine, **{k: _both(mine[k], v) if k in mine else v for k, v in theirs.items()}}
        else:
            fields[name] = _both(mine, theirs)
    return replace(one, **fields)


def _both(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Struct):
        return _added(mine, theirs)
    return mine and theirs if isinstance(mine, bool) else mine + theirs
