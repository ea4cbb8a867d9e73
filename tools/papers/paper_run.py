"""`measure_model`: measures the points of one model for the paper's table and figures."""

from __future__ import annotations

import gc
import json
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.concurrent_engines import ConcurrentEngines, EndedEarly
from weft.autosearch.advisor.curve import Curve
from weft.autosearch.advisor.engine_bench import EngineBench, means
from weft.autosearch.advisor.optimal_batch import solve
from weft.autosearch.advisor.replicas import advise_replicas
from weft.autosearch.advisor.sweep import Sweep
from weft.autosearch.progress_bar import SearchBar
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.workload import Lengths, workload_pair
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import WeftError
from weft.engine.progress import ProgressBar
from weft.tools.papers.paper_table import EPSILON, objectives

SWEEP_SHARE = 0.6
"""Share of a model's time; the rest is for replicas, if requested."""
LENGTHS = (100, 200, 400, 800)
"""Prompt or output tokens for Figure 9; the other has the first length."""
FIGURE_9_BOUND = 128


def measure_model(arguments: Namespace) -> None:
    """Sweep, refine under both objectives, then measure engines side by side. Raises `WeftError`."""
    begun, budget, file, name = time.monotonic(), arguments.budget_seconds, Path(arguments.file), arguments.name
    pair = workload_pair(arguments.workload)
    config = EngineConfig.model_validate_json(arguments.config)
    with ProgressBar() as start:
        engine = Engine(config.for_measuring(), start)
    with SearchBar(budget, command=f"weft bench batching: {name}") as bar:
        bench = EngineBench(engine, [pair], arguments.point_seconds, stop_requested=lambda: bar.stop_requested)
        prompt, output = means([pair])
        curve = Curve(
            model=config.model_name,
            workload=arguments.workload,
            prompt=prompt,
            output=output,
            options={},
            machine=bench.machine(),
        )
        if file.exists():
            from weft.autosearch.advisor.command import resume

            curve = resume(curve, file)

        def keep(made: Curve) -> None:
            curves.save(made, file)

        share = SWEEP_SHARE if arguments.replicas else 1.0

        def left() -> TimeBudget:
            seconds = max(0.1, share * budget - (time.monotonic() - begun))
            return TimeBudget(seconds, bar, lambda: bar.stop_requested)

        curve = Sweep(bench, curve, [], EPSILON, "throughput", left(), keep).run()
        for slo in objectives(curve).values():
            curve = Sweep(bench, curve, slo, EPSILON, "throughput", left(), keep).run()
        if arguments.lengthen and left().seconds > 1:
            _figure_9(bench, Path(arguments.out) / "figure_9.json", bar)
        bench.close()
        engine.close()
        del bench, engine
        gc.collect()
        _empty_cache()
        _replicas(curve, config, [pair], arguments, file, bar, begun + budget)


def _replicas(
    curve: Curve, config: EngineConfig, lengths: Lengths, arguments: Namespace, file: Path, bar: SearchBar, end: float
) -> None:
    """Measure 1, 2 … engines at the slot limit of each objective, up to the number that fits at the larger limit."""
    asked = {
        best.point.bound: advise_replicas(curve, best)
        for slo in objectives(curve).values()
        if (best := solve(curve, slo, EPSILON).best) is not None
    }
    wanted = [
        (bound, number)
        for bound in sorted(asked)
        for number in range(1, arguments.replicas + 1)
        if not any(r.bound == bound and r.replicas == number for r in curve.replicas)
    ]
    if not wanted or bar.stop_requested or time.monotonic() >= end:
        return
    largest = max(bound for bound, _ in wanted)
    number = min(arguments.replicas, asked[largest].fit)
    pages = asked[largest].needed_pages + 1
    with (
        suppress(EndedEarly),
        ConcurrentEngines(
            config, number, largest, pages, lengths, arguments.point_seconds, bar, lambda: bar.stop_requested
        ) as engines,
    ):
        took = 0.0
        for bound, several in wanted:
            begun = time.monotonic()
            if several > number or begun + took > end:
                continue
            point = engines.measure(several, bound)
            took = time.monotonic() - begun
            curve = msgspec.structs.replace(curve, replicas=(*curve.replicas, point))
            curves.save(curve, file)


def _figure_9(bench: EngineBench, file: Path, bar: SearchBar) -> None:
    """Measure activity at one slot limit with longer prompts or outputs."""
    if file.exists():
        return
    short = LENGTHS[0]
    longest = bench.engine.resolved.max_model_len
    pairs = [(n, short) for n in LENGTHS] + [(short, n) for n in LENGTHS[1:]]
    rows: list[dict[str, float | int | None]] = []
    for prompt, output in pairs:
        if prompt + output > longest:
            continue
        bar(f"{prompt} tokens in, {output} out")
        bench.drop()
        bench.lengths = [(prompt, output)]
        point = bench.measure(min(FIGURE_9_BOUND, bench.capacity))
        if bar.stop_requested:
            return  # the measurement was cut short
        rows.append(
            {
                "prompt": prompt, "output": output, "dram": point.dram_share, "warps": point.warps_share,
                "itl_ms": float(np.round(1e3 * point.itl.at(None), 4)), "output_per_s": point.output_per_s,
            }
        )  # fmt: skip
    file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    try:
        measure_model(Namespace(**json.loads(sys.argv[1])))
    except WeftError as error:
        print(f"weft bench batching: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # before anything was measured
        raise SystemExit(130) from None
