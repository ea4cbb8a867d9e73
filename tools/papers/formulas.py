"""`weft bench formulas`: derives the constants of the search's formulas from recorded profiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weft import output_file
from weft.autosearch.accelerators import Accelerator, of_gpu
from weft.autosearch.formula_profile import CONSTANTS, Constants, Curve, Formulas
from weft.autosearch.interference import Interference
from weft.autosearch.machine import Machine
from weft.autosearch.options import OneLineParser
from weft.autosearch.pipeline_structure import every_operation
from weft.autosearch.profile import SHIPPED, Profile, load_profile
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import ALL_REDUCE, Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import model_key

DEFAULT = SHIPPED / "llama-3-8b-h200.json"
_FULL: Curve = ([0.0, 1.0], [1.0, 1.0])
_IDEAL = msgspec.structs.replace(
    CONSTANTS, gemm=1.0, read=1.0, prefill=1.0, launch_ms=0.0, read_on=_FULL, link=1.0, hop_ms=0.0, send_on=_FULL
)


def main(argv: Sequence[str] | None = None) -> int:
    """Derive the constants of the search's formulas from recorded profiles, and print or write them.

    A profile of one GPU gives those of GEMMs and attention, one of several ranks also those of collectives. Constants
    that no profile gives stay as they are."""
    parser = OneLineParser("weft bench formulas", main.__doc__)
    parser.add_argument("profiles", metavar="PROFILE", nargs="*", type=Path, help="recorded profiles [the shipped one]")
    parser.add_argument("--out", metavar="FILE", type=output_file, help="write the constants to this JSON file")
    arguments = parser.parse_args(argv)
    found = CONSTANTS
    for path in arguments.profiles or [DEFAULT]:
        found = derive(load_profile(path), found)
    found = msgspec.structs.replace(found, profiles=tuple(p.name for p in arguments.profiles or [DEFAULT]))
    if arguments.out is not None:
        lines = msgspec.json.format(msgspec.json.encode(found), indent=0)
        arguments.out.write_bytes(lines.replace(b"\n", b"") + b"\n")
    before = msgspec.to_builtins(CONSTANTS)
    for name, value in msgspec.to_builtins(found).items():
        print(f"{name}: {value}" + ("" if value == before[name] else f" (was {before[name]})"))
    return 0


def derive(profile: Profile, base: Constants = CONSTANTS) -> Constants:
    """Return the constants that this profile gives, and the others of `base`. Raises `ConfigError`."""
    spec, device = _spec(profile), _accelerator(profile)
    machine, operations, total = Machine(profile, spec), every_operation(spec), profile.target.sms
    resources = {name: op.resource for name, op in operations.items()}
    curves, interference = machine.curves, Interference(profile, machine.curves, resources)
    ideal = Formulas(spec, device, _IDEAL)

    def works(op: Operation) -> list[float]:
        return sorted({p.work for p in profile.points if (p.operation, p.sms) == (op.name, total)})

    def levels(op: Operation) -> list[int]:
        return sorted({p.sms for p in profile.points if p.operation == op.name and p.sms < total})

    def line(op: Operation) -> tuple[float, float]:
        """Fit ms = latency + ideal ms / share of the rated speed, on all SMs."""
        amounts = works(op)
        slope, latency = np.polyfit(
            [ideal.ms(op, w, total) for w in amounts], [curves.ms(op.name, w, total, serial=True) for w in amounts], 1
        )  # fmt: skip
        return 1 / float(slope), max(0.0, float(latency))

    def speed_on(op: Operation, latency: float) -> Curve:
        """Share of the SMs -> share of the speed on all SMs, the median over amounts of work."""
        values = [
            statistics.median(
                (curves.ms(op.name, w, total) - latency) / (curves.ms(op.name, w, sms) - latency) for w in works(op)
            )
            for sms in levels(op)
        ]
        shares = [0.0, *(sms / total for sms in levels(op)), 1.0]
        return _curve(shares, [0.0, *values, 1.0])

    def watts(resource: Resource) -> float:
        own = [p.watts for p in profile.points if resources[p.operation] is resource and p.sms == total]
        return round(min(1.0, statistics.fmean(own) / device.watts), 3)

    def slower(resource: Resource, guests: set[int]) -> Curve:
        return _curve([n / total for n in sorted(guests)], [interference.slowdown(resource, n) for n in sorted(guests)])

    of = {role: [o for o in operations.values() if o.role is role and works(o)] for role in Role}
    decode, prefill = line(of[Role.DECODE_ATTENTION][0]), line(of[Role.PREFILL_ATTENTION][0])
    launch = (decode[1] + prefill[1]) / 2
    gemms = [
        ideal.ms(o, works(o)[-1], total) / (curves.ms(o.name, works(o)[-1], total, serial=True) - launch)
        for o in of[Role.PROJECTION]
    ]
    beside = [p for p in profile.pairs if resources[p.guest] is Resource.MEMORY]
    found: dict[str, Any] = {
        "gemm": statistics.median(gemms), "read": decode[0], "prefill": prefill[0], "launch_ms": launch,
        "read_on": speed_on(of[Role.DECODE_ATTENTION][0], decode[1]),
        "gemm_next_to_attention": slower(Resource.COMPUTE, {p.compute_sms for p in beside}),
        "attention_next_to_gemm": slower(Resource.MEMORY, {p.guest_sms for p in beside}),
        "watts": dict(base.watts) | {r: watts(r) for r in (Resource.COMPUTE, Resource.MEMORY)},
    }  # fmt: skip
    if reduces := [o for o in of[Role.NETWORK] if o.kernel == ALL_REDUCE]:
        link, latency = line(reduces[0])
        found |= {"link": link, "hop_ms": latency / 2, "send_on": speed_on(reduces[0], latency)}
        found["gemm_next_to_collective"] = statistics.fmean(
            p.compute_ms / curves.ms(p.compute, p.compute_work, p.compute_sms)
            for p in profile.pairs if resources[p.guest] is Resource.NETWORK
        )  # fmt: skip
        found["attention_and_collective"] = statistics.fmean(
            p.memory_ms / curves.ms(p.memory, p.memory_work, p.memory_sms) for p in profile.guest_pairs
        )
        found["watts"][Resource.NETWORK] = watts(Resource.NETWORK)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
    return msgspec.structs.replace(base, **rounded)


def _curve(shares: Sequence[float], values: Sequence[float]) -> Curve:
    return [round(s, 3) for s in shares], [round(v, 3) for v in values]


def _specs() -> Iterator[ModelSpec]:
    for folder in sorted(PRESETS.glob("*/config.json")):
        whole = read_spec(folder.parent)
        for ranks in (1, 2, 4, 8):
            try:
                yield whole.shard(0, ranks)
            except ModelError:
                break


def _spec(profile: Profile) -> ModelSpec:
    for spec in _specs():
        if model_key(spec) == profile.target.model:
            return spec
    raise ConfigError(f"no preset has the shape of this profile: {profile.target.model}")


def _accelerator(profile: Profile) -> Accelerator:
    device = of_gpu(profile.target.gpu)
    if device is None:
        raise ConfigError(f"the accelerator {profile.target.gpu} is not in the table")
    return device
