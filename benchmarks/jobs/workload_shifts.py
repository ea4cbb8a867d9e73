"""Runs `--max-num-seqs auto` through two workload shifts and compares it with the best fixed limit of each phase.

    python benchmarks/jobs/workload_shifts.py OUT --model-preset llama-3-8b --slo itl:p99:40ms

The engine always has waiting requests, so only the automatic slot limit decides how many run. New requests have the
lengths of the phase and running ones continue. `windows.jsonl` has one line a second with its longest iteration: device
time, idle time and prompt tokens. Afterwards the same engine runs with fixed limits, with prompts cut to the objective
and whole; the best limit that keeps the objective is the phase's reference. The last line compares the charged energy
with the device's counter.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.autosearch.advisor.engine_bench import EngineBench
from weft.engine.config import EngineConfig, Objective
from weft.engine.engine import Engine
from weft.engine.runner.device.energy_meter import EnergyCounter, energy_counter
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.slot_limit_keeper import SlotLimitKeeper
from weft.engine.wire.messages import EnergyStats

SHIFT_SECONDS = 10.0
"""Seconds after a shift in which windows may miss the objective."""
FIXED = ((1.0, True), (0.6, True), (1.0, False), (0.4, True), (0.8, True), (1.25, True), (0.4, False), (0.2, False))
"""Fixed limits as multiples of the slots that auto settled at, and whether prompts are cut; run as time allows."""


def of(seconds: np.ndarray, objective: Objective) -> float:
    if not len(seconds):
        return float("nan")
    return float(seconds.mean() if objective.statistic is None else np.percentile(seconds, objective.statistic))


class Watched(Listener):
    """The engine with the automatic limit, and a record of each second."""

    def __init__(self, engine: Engine, bench: EngineBench, objective: Objective, out: Path) -> None:
        self.engine, self.bench, self.objective = engine, bench, objective
        self._file = (out / "windows.jsonl").open("w")
        self._longest = (0.0, 0.0, 0.0, 0)
        self._first_step = 0
        engine.listeners.add(self)

    def on_busy(self, step: int, _now: float) -> None:
        self._first_step = step

    def on_result(self, result: StepResult, _now: float) -> None:
        batch, whole = result.batch, result.seconds + result.idle_seconds
        if whole > self._longest[0] and batch.step != self._first_step:
            self._longest = (whole, result.seconds, result.idle_seconds, batch.num_tokens - batch.num_decodes)

    def phase(self, number: int, lengths: tuple[int, int], seconds: float, begun: float) -> list[dict[str, Any]]:
        engine, bench = self.engine, self.bench
        bench.lengths = [lengths]
        rows: list[dict[str, Any]] = []
        start = at = time.monotonic()
        bench._gaps = []
        before = engine.stats().scheduler
        while (now := time.monotonic()) - start < seconds:
            bench._step(engine.scheduler.slots.limit)
            if now - at < 1.0:
                continue
            stats = engine.stats().scheduler
            gaps = np.concatenate(bench._gaps) if bench._gaps else np.zeros(0)
            rows.append(
                {
                    "phase": number, "at": round(now - begun, 2), "into": round(now - start, 2),
                    "slots": engine.scheduler.slots.limit, "running": stats.running,
                    "value_ms": round(1e3 * of(gaps, self.objective), 3),
                    "out_per_s": round((stats.generation_tokens - before.generation_tokens) / (now - at), 1),
                    "longest_ms": round(1e3 * self._longest[1], 3), "its_idle_ms": round(1e3 * self._longest[2], 3),
                    "its_prompts": self._longest[3],
                }
            )  # fmt: skip
            self._longest = (0.0, 0.0, 0.0, 0)
            self._file.write(json.dumps(rows[-1]) + "\n")
            self._file.flush()
            at, before, bench._gaps = now, stats, []
        return rows


class Joules:
    """Compares the engine's energy accounting with the device's counter."""

    REST_SECONDS = 3.0

    def __init__(self, engine: Engine, counter: EnergyCounter) -> None:
        self._engine, self._counter = engine, counter
        self._rest()  # measure the idle power
        self._begun, self._counted, self._before = time.monotonic(), counter.joules(), self._energy()

    def _rest(self) -> None:
        until = time.monotonic() + self.REST_SECONDS
        while time.monotonic() < until:
            self._engine.idle()
            time.sleep(0.005)

    def _energy(self) -> EnergyStats:
        energy = self._engine.stats().energy
        assert energy is not None
        return energy

    def report(self) -> None:
        self._rest()
        energy, counted = self._energy(), self._counter.joules() - self._counted
        requests, rest = energy.charged - self._before.charged, energy.idle_joules - self._before.idle_joules
        print(
            f"{time.monotonic() - self._begun:.0f} s: requests {requests:,.0f} J + idle {rest:,.0f} J = "
            f"{(requests + rest) / counted:.4f} of the counter's {counted:,.0f} J", flush=True,
        )  # fmt: skip


def measured(bench: EngineBench, bound: int, *, cut: bool) -> Any:
    """Measures a fixed limit. It fills the slots with whole prompts, because cut ones would take minutes."""
    scheduler = bench.engine.scheduler
    keeper, scheduler.chunk_keeper = scheduler.chunk_keeper, None
    bench.drop()
    bench.ready(bound)
    if cut:
        scheduler.chunk_keeper = keeper
    try:
        return bench.measure(bound)
    finally:
        scheduler.chunk_keeper = keeper


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slo", default="itl:p99:40ms")
    parser.add_argument("--slots", type=int, default=512, help="largest number of slots")
    parser.add_argument("--phases", nargs=3, default=["161:338", "1024:512", "161:338"])
    parser.add_argument("--phase-seconds", type=float, default=45.0)
    parser.add_argument("--point-seconds", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit, the start included")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    model = {"model_preset": options.model_preset, "load_format": "dummy"} if options.model_preset else {}
    config = EngineConfig.model_validate(
        {**model, "device": options.device, "max_num_seqs": f"auto:{options.slots}", "slo": [options.slo],
         "prefix_caching": False}
    )  # fmt: skip
    phases = [(int(p), int(d)) for p, d in (phase.split(":") for phase in options.phases)]
    engine = Engine(config.for_measuring())
    (objective,) = config.objectives
    bench = EngineBench(engine, [phases[0]], options.point_seconds)
    watched = Watched(engine, bench, objective, options.out)
    gc.collect()
    gc.freeze()  # as a daemon does
    joules = Joules(engine, energy_counter(engine.resolved.device)) if engine.describe().energy_source else None
    begun = time.monotonic()
    windows = [watched.phase(i, p, options.phase_seconds, begun) for i, p in enumerate(phases)]
    changes = dict(engine.scheduler.slot_limit_changes)
    # Judge each phase from 10 s after its start on.
    settled = [[row for row in rows if row["into"] > SHIFT_SECONDS + 1] for rows in windows]
    kept = [[row["value_ms"] <= 1e3 * objective.limit for row in rows] for rows in settled]
    total = [one for rows in kept for one in rows]
    print(
        f"auto: {sum(total)} of {len(total)} windows within {options.slo} ({np.mean(total):.2%}), by phase "
        f"{[f'{np.mean(rows):.2%}' for rows in kept]}; changes {changes}", flush=True,
    )  # fmt: skip
    known: dict[tuple[int, int], list[tuple[int, bool, float, float]]] = {}
    keeper = engine.listeners.find(SlotLimitKeeper)
    assert keeper is not None
    engine.listeners.remove(keeper)
    for factor, cut in FIXED:
        for i, lengths in enumerate(phases):
            if phases.index(lengths) != i or time.monotonic() > end - 5 * options.point_seconds:
                continue
            settled_at = float(np.median([row["slots"] for row in settled[i]]))
            bound = int(min(options.slots, max(1, round(factor * settled_at))))
            if (bound, cut) in [one[:2] for one in known.get(lengths, [])]:
                continue
            bench.lengths = [lengths]
            point = measured(bench, bound, cut=cut)
            value = point.itl.at(objective.statistic)
            known.setdefault(lengths, []).append((bound, cut, value, point.output_per_s))
            print(
                f"{lengths[0]}:{lengths[1]} fixed {bound}, prompts {'cut' if cut else 'whole'}: ran {point.batch:.1f}, "
                f"{objective} {1e3 * value:.1f} ms, {point.output_per_s:,.0f} out tokens/s over {point.seconds:.1f} s",
                flush=True,
            )  # fmt: skip
    for i, lengths in enumerate(phases):
        rates = [row["out_per_s"] for row in settled[i]]
        fits = [(out, bound) for bound, _, value, out in known.get(lengths, []) if value <= objective.limit]
        best, bound = max(fits, default=(float("nan"), 0))
        whole = [row["out_per_s"] for row in windows[i]]
        print(
            f"phase {i} {lengths[0]}:{lengths[1]}: auto {np.mean(rates):,.0f} out tokens/s after the shift "
            f"({np.mean(whole):,.0f} including it) at {np.median([row['slots'] for row in settled[i]]):.0f} slots, "
            f"{np.mean(rates) / best:.3f} of the best fixed limit that keeps the objective ({bound}: {best:,.0f})",
            flush=True,
        )
    bench.drop()
    if joules is not None:
        joules.report()
    bench.close()
    engine.close()


if __name__ == "__main__":
    main()
