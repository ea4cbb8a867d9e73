"""The choice of the dense batch: how many tokens an iteration shall have."""

from __future__ import annotations

from weft.autosearch import batches, breakeven
from weft.autosearch.bench_protocol import Load
from weft.autosearch.budget import Budget
from weft.autosearch.machine import Machine
from weft.autosearch.refine import OutOfTime, serial_for
from weft.autosearch.report import Line
from weft.autosearch.solving import Solving
from weft.autosearch.timely import Timely


def choose_dense_batch(
    name: str, full: Load, machine: Machine, bench: Timely | None, solving: Solving, budget: Budget
) -> tuple[Load, list[Line]]:
    """The load of the dense batch whose best pipeline takes the least time a token, and what was looked at.

    Tiles and SMs must come out even: fewer tokens in whole waves can beat more of them. Where no pipeline is faster
    than the serial plan of the largest dense batch, `full`, it is that one. name: of its load.
    """
    lines: list[Line] = []
    serial = serial_for(machine.spec, full, machine.num_sms)
    try:
        best = ((bench or machine).period(serial, full).ms * (1 - breakeven.MIN_GAIN) / full.tokens, full)
    except OutOfTime:
        return full, lines
    candidates = batches.dense_batches(full)
    if solving.workers > 1:  # else one by one, between measurements
        solving.solve([(name, load) for load in candidates])
    for load in candidates:
        stages = solving.stages(name, load)
        if not stages.choices:
            continue
        budget.tell(f"{load.tokens} tokens")
        chosen = stages.choices[0]
        try:
            timing = (bench or machine).period(chosen.period, load)
        except OutOfTime:
            break
        lines.append(Line(f"{load.tokens} tokens", "stage II", chosen.ms, timing if bench is not None else None))
        best = min(best, (timing.ms / load.tokens, load))
    return best[1], lines
