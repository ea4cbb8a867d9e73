"""Throughput curves of a made-up engine."""

from __future__ import annotations

from typing import Any

from weft.autosearch.advisor.curve import QUANTILES, Curve, Machine, Point, Times
from weft.engine.config import Objective

GIB = 2**30
SLO = [Objective.parse("itl:p99:50ms")]
MACHINE = Machine(
    device="cuda:0", name="A GPU", memory=80 * GIB, weights=3 * GIB, working=2 * GIB, page_bytes=GIB // 1024,
    page_size=64, pages=70 * 1024, joules="nvml",
)  # fmt: skip


def times(seconds: float, tail: float = 1.0) -> Times:
    return Times(seconds, tuple(seconds * (1 + (tail - 1) * q / 100) for q in QUANTILES))


def point(bound: int, **fields: Any) -> Point:
    """A made-up engine: an iteration takes 10 ms plus 0.2 ms per request, and each request holds 100 pages."""
    batch = fields.pop("batch", float(bound))
    step = 0.010 + 0.0002 * batch
    fixed = {
        "bound": bound, "batch": batch, "seconds": 3.0, "iterations": 300, "output_per_s": batch / step,
        "itl": times(step, 1.5), "ttft": times(5 * step), "kv_pages": round(100 * batch), "kv_share": batch / 700,
        "idle_share": 0.004, "prefill_share": 0.05, "joules_per_token": (150 + 400 * batch / 512) * step / batch,
    }  # fmt: skip
    return Point(**{**fixed, **fields})


def curve(points: list[Point] | None = None, **fields: Any) -> Curve:
    made = {
        "model": "m", "workload": "161:338", "prompt": 161.0, "output": 338.0, "options": {}, "machine": MACHINE,
        "points": tuple(points or [point(2**i) for i in range(10)]),
    }  # fmt: skip
    return Curve(**{**made, **fields})
