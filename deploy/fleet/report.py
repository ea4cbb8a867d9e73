"""Prints and writes results of `weft fleet`: tables, JSON, and a plot of goodput over rates and engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from weft.deploy.fleet.search import Point, best
from weft.deploy.fleet.settings import Settings
from weft.engine.progress import for_stdout
from weft.loadgen.statistics import Distribution


def print_points(points: Sequence[Point], settings: Settings) -> None:
    profile = settings.profile
    title = f"weft fleet: {profile.model} on {profile.device}"
    table = Table(title=title, caption="simulated; times are means / 99th percentiles in ms")
    rows = [_row(point) for point in points]
    for column in rows[0]:
        table.add_column(column, justify="right")
    for point, row in zip(points, rows, strict=True):
        table.add_row(*row.values(), style=None if point.met or not settings.objectives else "dim")
    console = for_stdout()
    console.print(table)
    if settings.objectives:
        wanted = ", ".join(str(objective) for objective in settings.objectives)
        for rate, chosen in best(points).items():
            at = "" if rate is None else f" at {rate:g}/s"
            if chosen is None:
                most = max(p.engines for p in points if p.rate == rate)
                console.print(f"{wanted}{at}: missed, with up to {most} engines")
            else:
                c, engines = chosen.configuration, f"{chosen.engines} engine{'s' * (chosen.engines > 1)}"
                console.print(
                    f"{wanted}{at}: {engines}, --max-num-seqs {c.seqs} --max-num-batched-tokens "
                    f"{c.max_num_batched_tokens}; goodput {chosen.result.attainment.goodput:.2f}/s"
                )
    if (short := too_short(points)) is not None:
        console.print(short, soft_wrap=True)
    if (e := profile.error) is not None:
        console.print(
            f"the profile's fit has a median error of {e.median:.1%} and a p90 error of {e.p90:.1%} over "
            f"{e.iterations} iterations"
        )


SHOWN_KEYS = 4  # most API keys that have a column each; a JSON report has all
LONG_ENOUGH = 10
"""Minimum duration of arrivals in mean latencies; shorter runs do not show a growing queue."""


def too_short(points: Sequence[Point]) -> str | None:
    """Return a warning if arrivals end before the load is steady."""
    for point in points:
        records = point.result.everything.records
        arrivals, mean = max(record.due for record in records), point.result.distributions["e2e"].mean
        if len(records) > 1 and arrivals < LONG_ENOUGH * mean:
            return (
                f"arrivals for {arrivals:.0f} s are short compared with answers of {mean:.1f} s: overload may not "
                "show, and goodput includes the time until the last answer; use a longer --duration"
            )
    return None


def _ms(of: Distribution) -> str:
    return f"{of.mean * 1e3:.0f} / {of.p99 * 1e3:.0f}"


def _row(point: Point) -> dict[str, str]:
    r, c = point.result, point.configuration
    ttft, tpot = r.distributions["ttft"], r.distributions["tpot"]
    answered = sum(record.ok for record in r.everything.records)
    tokens = sum(record.received_tokens for record in r.everything.records if record.ok)
    of_keys = [measures.distributions["ttft"] for measures in r.by_key]
    return {
        "engines": str(point.engines),
        "seqs": c.seqs,
        "budget": str(c.max_num_batched_tokens),
        "offered /s": "" if r.offered_rate is None else f"{r.offered_rate:.3g}",
        "TTFT": _ms(ttft),
        **{f"TTFT of key {k}": _ms(of) for k, of in enumerate(of_keys, 1) if 1 < len(of_keys) <= SHOWN_KEYS},
        "TPOT": f"{tpot.mean * 1e3:.1f} / {tpot.p99 * 1e3:.1f}",
        "output tok/s": f"{r.throughput()['output_tokens_per_second']:,.0f}",
        "goodput /s": f"{r.attainment.goodput:.3g}",
        "attained": f"{r.attainment.share:.1%}",
        "failed": str(len(r.everything.records) - answered),
        "prefix hits": f"{r.hit_share:.1%}",
        "max load": f"{r.imbalance:.2f}x",
        "busy": f"{sum(r.busy) / r.span / len(r.busy):.0%}",
        "J / output tok": "" if r.joules is None or not tokens else f"{r.joules / tokens:.3f}",
    }


def write_json(path: Path, points: Sequence[Point], settings: Settings) -> None:
    profile = settings.profile
    chosen = best(points) if settings.objectives else {}
    summary = {
        "profile": {"model": profile.model, "device": profile.device, "made": profile.made},
        "objectives": [str(objective) for objective in settings.objectives],
        "best": [{"rate": rate, **({} if point is None else point.result.summary())} for rate, point in chosen.items()],
        "points": [{"rate": point.rate, **point.result.summary()} for point in points],
    }
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, points: Sequence[Point], settings: Settings) -> None:
    """Plot goodput by rate, one line per number of engines and configuration, and attainment as a heat map."""
    from matplotlib.figure import Figure

    from weft.loadgen.plots import COLOURS

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    lines, shades = figure.subplots(1, 2)
    rated = sorted(points, key=lambda p: (p.engines, _offered(p)))
    kinds = list(dict.fromkeys((p.engines, p.configuration) for p in rated))
    for i, (engines, configuration) in enumerate(kinds):
        own = [p for p in rated if (p.engines, p.configuration) == (engines, configuration)]
        label = f"{engines} engine{'s' * (engines > 1)}"
        if len(settings.configurations) > 1:
            label += f", {configuration.seqs} seqs, {configuration.max_num_batched_tokens} tokens"
        rates, goodput = [_offered(p) for p in own], [p.result.attainment.goodput for p in own]
        lines.plot(rates, goodput, marker="o", label=label, color=COLOURS[i % len(COLOURS)])
    most = max(_offered(p) for p in points)
    lines.plot([0, most], [0, most], linestyle="--", color="#888888", linewidth=1, label="offered rate")
    lines.set(xlabel="offered requests/s", ylabel="goodput, requests/s", xlim=(0, None), ylim=(0, None))
    lines.legend(fontsize="small")
    highest: dict[tuple[int, float], Point] = {}
    for p in points:
        before = highest.setdefault((p.engines, round(_offered(p), 6)), p)
        if p.result.attainment.share > before.result.attainment.share:
            highest[p.engines, round(_offered(p), 6)] = p
    rates, counts = sorted({rate for _, rate in highest}), sorted({engines for engines, _ in highest})
    grid = [
        [highest[n, rate].result.attainment.share if (n, rate) in highest else float("nan") for rate in rates]
        for n in counts
    ]
    image = shades.imshow(grid, origin="lower", aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
    shades.set_xticks(range(len(rates)), [f"{rate:.3g}" for rate in rates])
    shades.set_yticks(range(len(counts)), [str(n) for n in counts])
    shades.set(xlabel="offered requests/s", ylabel="engines", title="share of requests that met the objectives")
    for (engines, rate), p in highest.items():
        if p.met:
            shades.text(rates.index(rate), counts.index(engines), "met", ha="center", va="center", color="black",
                        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0})  # fmt: skip
    figure.colorbar(image, ax=shades)
    wanted = ", ".join(str(objective) for objective in settings.objectives) or "answered"
    figure.suptitle(f"{settings.profile.model}, {settings.profile.device}, simulated: {wanted}")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _offered(point: Point) -> float:
    return point.result.offered_rate or 0.0
