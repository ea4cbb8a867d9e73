"""The advice as a table and sentences for the terminal; the HTML page uses both too."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from weft.autosearch.advisor.advice import Advice
from weft.autosearch.advisor.optimal_batch import Verdict

GIB = 2**30


def sentences(advice: Advice) -> list[str]:
    curve, solution = advice.curve, advice.solution
    best, most, replicas = solution.best, solution.most, advice.replicas
    if best is None or replicas is None:
        return [f"No slot limit fits: {solution.why_not}.", *_noted(advice)]
    point, share = best.point, best.throughput / most.throughput
    aim = "the fewest joules per token" if advice.aim == "energy" else "the highest throughput"
    out = [
        f"Run {point.bound} requests at once: {aim} of the slot limits that "
        + (f"meet {', '.join(map(str, advice.objectives))} and " if advice.objectives else "")
        + f"have an efficiency above {advice.epsilon:g} (here {best.efficiency:.2f}).",
        f"{point.batch:.1f} ran on average; {best.throughput:,.0f} tokens/s, {share:.0%} of the maximum (at "
        f"{most.point.bound}); time between tokens {ms(point.itl.at(50.0))} (median), {ms(point.itl.at(99.0))} (p99).",
        f"They held up to {point.kv_pages} of {curve.machine.pages} KV pages: {replicas.freed / GIB:.2f} GiB of "
        f"{curve.machine.pages * curve.machine.page_bytes / GIB:.2f} GiB are free for prefixes or other engines.",
        f"replicas: {replicas.replicas}. {replicas.reason[0].upper()}{replicas.reason[1:]}. The memory fits "
        f"{replicas.fit} engines at this limit, with one copy of the weights.",
    ]
    if point.joules_per_token is not None:
        out.append(f"{point.joules_per_token:.3g} joules per output token.")
    if advice.measured is not None:
        out.append(f"Advised rate: {advice.rate:.3g} requests/s. Measured with Poisson arrivals: {advice.measured}.")
    elif advice.rate:
        out.append(f"Advised rate: {advice.rate:.3g} requests/s, simulated on these curves with Poisson arrivals.")
    else:
        out.append("No request rate meets the objectives when simulated on these curves.")
    return [*out, *_noted(advice)]


def _noted(advice: Advice) -> list[str]:
    return [f"{note[0].upper()}{note[1:]}." for note in advice.notes]


def ms(seconds: float) -> str:
    return NOTHING if seconds != seconds else f"{seconds * 1e3:.3g} ms"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


COLUMNS = (
    "slot limit", "ran", "tokens/s", "eff.", "itl p50", "itl p99", "ttft p50", "KV", "idle", "J/token", "DRAM", "SMs",
    "",
)  # fmt: skip
OPTIONAL_COLUMNS = ("SMs", "DRAM", "ttft p50", "ran", "idle", "KV", "eff.")
"""Columns that a narrow terminal omits, in this order."""
NOTHING = "–"


def rows(advice: Advice) -> list[tuple[str, ...]]:
    """Return the table rows, by batch, with the cells of `COLUMNS`."""
    return [_row(advice, v) for v in advice.solution.verdicts]


def _row(advice: Advice, v: Verdict) -> tuple[str, ...]:
    p, best = v.point, advice.solution.best
    marks = [f"{o.measure} {'late' if p.of(o) == p.of(o) else 'not seen'}" for o in v.late]
    marks += [] if v.efficient else ["inefficient"]
    if best is not None and p.bound == best.point.bound:
        marks = ["advised"]
    if v is advice.solution.knee:
        marks.append("knee")
    joules = NOTHING if p.joules_per_token is None else f"{p.joules_per_token:.3g}"
    return (
        str(p.bound), f"{p.batch:.1f}", f"{v.throughput:,.0f}", f"{v.efficiency:.2f}", ms(p.itl.at(50.0)),
        ms(p.itl.at(99.0)), ms(p.ttft.at(50.0)), percent(p.kv_share), f"{p.idle_share:.1%}", joules,
        percent(p.dram_share), percent(p.sm_share), ", ".join(marks),
    )  # fmt: skip


def _table(advice: Advice, lines: list[tuple[str, ...]], shown: list[int]) -> Table:
    curve = advice.curve
    table = Table(title=f"{curve.model}, {curve.workload}, {curve.machine.name}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i in shown:
        table.add_column(COLUMNS[i], justify="right" if COLUMNS[i] else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i] for i in shown), style="bold green" if line[-1].startswith("advised") else None)
    return table


def show(advice: Advice, console: Console) -> None:
    curve = advice.curve
    lines = rows(advice)
    shown = [i for i, name in enumerate(COLUMNS) if not name or any(line[i] != NOTHING for line in lines)]
    omitted = []
    wide = console.options.update(width=1000)
    while Measurement.get(console, wide, table := _table(advice, lines, shown)).maximum > console.width:
        column = next((name for name in OPTIONAL_COLUMNS if COLUMNS.index(name) in shown), None)
        if column is None:
            break
        shown.remove(COLUMNS.index(column))
        omitted.append(column)
    console.print(table)
    if omitted:
        console.print(f"Omitted {', '.join(omitted)}: use a wider terminal or --html.", highlight=False)
    for r in curve.replicas:
        console.print(
            f"{r.replicas} engines, {r.bound} each: {curve.throughput(r):,.0f} tokens/s, itl p99 {ms(r.itl.at(99.0))}",
            highlight=False,
        )
    for text in sentences(advice):
        console.print(text, highlight=False)
