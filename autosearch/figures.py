"""The figures of a pipeline in its plan: what it and the serial plan take at a load, and when each operation runs."""

from __future__ import annotations

import msgspec

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.breakeven import MIN_GAIN
from weft.autosearch.machine import Machine
from weft.autosearch.refine import serial_for
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Period


def with_figures(machine: Machine, period: Period, load: Load, measured: tuple[Timing, Timing] | None) -> Period:
    """measured: the pipeline and the serial plan, where they were; `gain` is what was predicted else."""
    serial = serial_for(machine.spec, load, machine.num_sms)
    timeline, durations = machine.timeline(period, load)
    plain = machine.period(serial, load)
    figures = {
        "kv_tokens": float(load.kv_tokens),
        "predicted_ms": timeline.ms,
        "serial_predicted_ms": plain.ms,
        "predicted_joules": machine.period(period, load).joules,
        "serial_predicted_joules": plain.joules,
    }
    for prefix, timing in zip(("", "serial_"), measured or (), strict=False):
        figures |= {
            f"{prefix}measured_ms": timing.ms, f"{prefix}measured_watts": timing.watts,
            f"{prefix}measured_mhz": timing.mhz, f"{prefix}measured_joules": timing.joules,
        }  # fmt: skip
    kind = "predicted" if measured is None else "measured"
    figures["gain"] = figures[f"serial_{kind}_ms"] / figures[f"{kind}_ms"]
    for i, (start, ms) in enumerate(zip(timeline.starts, durations, strict=True)):
        figures |= {f"start.{i}": start, f"ms.{i}": ms}
    for op, work in zip(serial.operations, machine.works(serial, load), strict=True):
        figures[f"serial.{op.operation}"] = machine.curves.ms(op.operation, work, machine.num_sms, serial=True)
    return msgspec.structs.replace(
        period, figures={k: round(v, 6) for k, v in figures.items()}, offload=offload_beside(machine.spec)
    )


def wins(period: Period) -> bool:
    return period.figures["gain"] > 1 + MIN_GAIN


def offload_beside(spec: ModelSpec) -> str:
    """The largest product, where memory is idlest for longest: gate-up of the FFN (paper §4.2.2)."""
    products = [o for o in spec.layer_operations() if o.role in (Role.PRODUCT, Role.EXPERTS)]
    return max(products, key=lambda o: o.parameters).name
