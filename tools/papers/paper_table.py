"""Table IV of "Mind the Memory Gap", from curves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.autosearch.advisor.curve import Curve, Point
from weft.autosearch.advisor.optimal_batch import Solution, solve
from weft.autosearch.advisor.replicas import advise_replicas
from weft.engine.config import Objective

EPSILON = 0.1
REFERENCE = 32
"""The slot limit whose mean latency defines the objectives (paper, §VI-A)."""
FACTORS = {"strict": 2.0, "relaxed": 4.0}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of Table IV."""

    model: str
    config: str
    """MAX, or the objective's name and number of replicas."""
    bound: int
    batch: float
    tokens_per_s: float
    itl_ms: float
    kv_share: float | None
    """Share of the pool of an engine that has all the memory."""
    idle_share: float
    dram_share: float | None = None
    warps_share: float | None = None
    joules_per_token: float | None = None
    of_max: float = 1.0
    """Throughput relative to MAX."""
    advice: str = ""


def objectives(curve: Curve) -> dict[str, list[Objective]]:
    """The paper's two objectives on the mean time between tokens; none if the reference was not measured."""
    reference = curve.known(REFERENCE)
    if reference is None or reference.itl.mean is None:
        return {}
    return {name: [Objective("itl", None, factor * reference.itl.mean)] for name, factor in FACTORS.items()}


def table_iv(curve: Curve) -> list[Row]:
    """MAX, then for each objective the slot limit found, its replicas and the advisor's verdict."""
    solved = {name: solve(curve, slo, EPSILON) for name, slo in objectives(curve).items()}
    most = solve(curve, [], 0.0, tie=0.0).most
    rows = [_row(curve, "MAX", most.point, most.throughput, "")]
    for name, solution in solved.items():
        if solution.best is None:
            continue
        advice = advise_replicas(curve, solution.best)
        said = f"replicas: {advice.replicas} ({advice.reason})"
        rows.append(_row(curve, name, solution.best.point, most.throughput, said))
        for r in curve.replicas:
            if r.bound == solution.best.point.bound and r.replicas > 1:
                throughput = curve.throughput(r)
                rows.append(
                    Row(
                        model=curve.model, config=f"{name}, {r.replicas} replicas", bound=r.bound, batch=r.batch,
                        tokens_per_s=throughput, itl_ms=1e3 * r.itl.at(None), kv_share=None, idle_share=r.idle_share,
                        of_max=throughput / most.throughput,
                    )
                )  # fmt: skip
    return rows


def _row(curve: Curve, config: str, point: Point, most: float, advice: str) -> Row:
    throughput = curve.throughput(point)
    return Row(
        model=curve.model, config=config, bound=point.bound, batch=point.batch, tokens_per_s=throughput,
        itl_ms=1e3 * point.itl.at(None), kv_share=point.kv_pages / max(1, curve.machine.pages),
        idle_share=point.idle_share, dram_share=point.dram_share, warps_share=point.warps_share,
        joules_per_token=point.joules_per_token, of_max=throughput / most, advice=advice,
    )  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    head = "| model | | bound | ran | tokens/s | of MAX | ITL ms | KV | device waits | DRAM | warps | J/token |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = [
            r.model, r.config, str(r.bound), f"{r.batch:.1f}", f"{r.tokens_per_s:,.0f}", f"{r.of_max:.2f}",
            f"{r.itl_ms:.2f}", _percent(r.kv_share), f"{r.idle_share:.1%}", _percent(r.dram_share),
            _percent(r.warps_share), "–" if r.joules_per_token is None else f"{r.joules_per_token:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    said = [f"- {r.model}, {r.config}: {r.advice}" for r in rows if r.advice]
    return "\n".join([*lines, "", *said]) + "\n"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def best(curve: Curve) -> Solution | None:
    """The solution under the strict objective."""
    strict = objectives(curve).get("strict")
    return solve(curve, strict, EPSILON) if strict else None
