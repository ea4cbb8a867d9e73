"""Totals of engines that have ended: counters go on where the last engine's stood."""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from weft.engine.wire.messages import EnergyStats, EngineStats, TierStats

Stats = TypeVar("Stats", bound=Struct)

_ENGINE = ("iterations", "iterations_pipelined", "iterations_idle_seconds")
_SCHEDULER = (
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "decode_tokens",
    "prefill_tokens",
    "nonfinite_logits",
    "displaced",
    "overtaken",
)
_ENERGY = ("joules", "at_rest", "charged")
_TIER = ("hit_tokens", "missed_tokens", "bytes_in", "bytes_out", "evictions", "failures")


def plus(before: EngineStats, now: EngineStats) -> EngineStats:
    """`now`, with its totals raised by those of engines before it."""
    tiers = now.scheduler.tiers
    for name, tier in before.scheduler.tiers.items():
        # One that this engine has not told of yet: what it has done stays, what it holds is gone.
        tiers = {**tiers, name: _raised(tiers.get(name, TierStats()), tier, _TIER)}
    scheduler = replace(_raised(now.scheduler, before.scheduler, _SCHEDULER), tiers=tiers)
    energy = now.energy
    if before.energy is not None:
        source = energy or EnergyStats(source=before.energy.source)
        energy = _raised(source, before.energy, _ENERGY)
    return replace(_raised(now, before, _ENGINE), scheduler=scheduler, energy=energy)


def _raised(now: Stats, before: Stats, names: tuple[str, ...]) -> Stats:
    return replace(now, **{name: getattr(now, name) + getattr(before, name) for name in names})
