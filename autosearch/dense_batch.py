"""The iterations that a search considers, and the choice of the dense batch: the tokens of a full iteration."""

from __future__ import annotations

from weft.autosearch.bench_protocol import Load
from weft.autosearch.break_even import MIN_GAIN, serial_ms
from weft.autosearch.machine import Machine
from weft.autosearch.refine import OutOfTime
from weft.autosearch.report import Line
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.timed_bench import TimedBench
from weft.autosearch.two_stage_search import LoadSolver
from weft.engine.plans.plan import TOKEN_STEP

DENSE_STEPS = 5
"""Number of dense batches to consider: the largest, then each smaller by TOKEN_STEP."""


def steady_within(load: Load, capacity: int | None) -> Load:
    """Reduce a steady state to the decodes that fit the KV pool. The dense batch shrinks in proportion."""
    fitting = load.within(capacity)
    if fitting.decodes == load.decodes:
        return load
    steps = -(-load.tokens * fitting.decodes // (load.decodes * TOKEN_STEP))
    return fitting._replace(tokens=min(load.tokens, max(1, steps) * TOKEN_STEP))


def dense_batches(load: Load) -> list[Load]:
    """Return the load's dense batch and smaller ones in the same steady state, with decodes in proportion."""
    sizes = [load.tokens - k * TOKEN_STEP for k in range(DENSE_STEPS)]
    return [load._replace(tokens=n, decodes=round(load.decodes * n / load.tokens)) for n in sizes if n >= TOKEN_STEP]


def decode_batches(load: Load, max_num_seqs: int, capacity: int | None) -> list[Load]:
    """Return iterations without prefill, in which every running request decodes.

    One has the requests that fit at the workload's context. The other has `max_num_seqs` requests at a context that
    fits. Sizes are even multiples of TOKEN_STEP; sizes that are no smaller than the dense batch are left out."""
    fitting = max_num_seqs if capacity is None else min(max_num_seqs, capacity // load.context)
    batches = []
    for tokens in sorted({-(-n // (2 * TOKEN_STEP)) * 2 * TOKEN_STEP for n in (fitting, max_num_seqs)}):
        context = load.context if capacity is None else min(load.context, capacity // max(1, tokens))
        if 0 < tokens < load.tokens and context:
            batches.append(load._replace(tokens=tokens, decodes=tokens, context=context))
    return batches


def choose_dense_batch(
    name: str, full: Load, machine: Machine, bench: TimedBench | None, solver: LoadSolver, budget: TimeBudget
) -> tuple[Load, list[Line]]:
    """Return the load whose best pipeline takes the least time per token, and the report lines of all candidates.

    Fewer tokens can be faster if their tiles fill full waves. Returns the largest dense batch, `full`, if no pipeline
    beats its serial plan. name: the load's name."""
    lines: list[Line] = []
    try:
        best = (serial_ms(bench or machine, machine.spec, full) * (1 - MIN_GAIN) / full.tokens, full)
    except OutOfTime:
        return full, lines
    candidates = dense_batches(full)
    if solver.workers > 1:  # otherwise solve one at a time, between measurements
        solver.solve([(name, load) for load in candidates])
    for load in candidates:
        results = solver.results(name, load)
        if not results.choices:
            continue
        budget.report(f"{load.tokens} tokens")
        chosen = results.choices[0]
        try:
            timing = (bench or machine).period(chosen.period, load)
        except OutOfTime:
            break
        lines.append(Line(f"{load.tokens} tokens", "stage II", chosen.ms, timing if bench is not None else None))
        best = min(best, (timing.ms / load.tokens, load))
    return best[1], lines
