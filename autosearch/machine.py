"""`Machine`: a `Bench` that predicts measurements from a profile. Both stages search on it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.interference import Interference
from weft.autosearch.profile import Curves, Profile, work_of
from weft.autosearch.simulate import Drag, Timeline, simulate
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Resource
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import NanoOperation, Period


class Machine:
    """Durations D_best / P(R): alone on all SMs, or on some SMs while another operation runs (NanoFlow §4.1.3)."""

    def __init__(self, profile: Profile, spec: ModelSpec, others: Sequence[ModelSpec] = ()) -> None:
        """others: the model with other collectives, whose serial plan may be faster."""
        self.others = tuple(Machine(profile, other) for other in others)
        self.spec, self.profile = spec, profile
        self.num_sms = profile.target.sms
        self.memory, self.seconds = profile.memory, 0.0
        self.operations = {o.name: o for o in spec.layer_operations()}
        if missing := sorted(set(self.operations) - set(profile.features)):
            raise ConfigError(f"the profile has no operation {', '.join(missing)}: use a profile of this model")
        self.curves = Curves(profile)
        resources = {name: o.resource for name, o in self.operations.items()}
        self.interference = Interference(profile, self.curves, resources)
        self.watts = max(p.watts for p in profile.points)  # Highest sustained power of the card.

    def works(self, period: Period, load: Load) -> list[float]:
        """Return the work of each nano-operation of the period."""
        ranges = period.nano_batches(self.spec)
        assigned = dict(zip(ranges, load.assigned(ranges), strict=True))
        works = []
        for op in period.operations:
            tokens = max(0, min(op.end, load.tokens) - op.begin)
            part = assigned.get((op.begin, op.end), load._replace(tokens=tokens))
            works.append(work_of(self.operations[op.operation], part))
        return works

    def duration(self, operation: str, work: float, sms: int, *, serial: bool = False) -> float:
        """Milliseconds on `sms` SMs: alone if that is all of them, otherwise next to another operation."""
        ms = self.curves.ms(operation, work, sms, serial=serial)
        return ms if sms >= self.num_sms else ms * self.interference.slowdown(self.operations[operation].resource, sms)

    def durations(self, period: Period, load: Load) -> list[float]:
        """Milliseconds of each nano-operation, without the cost of concurrent collectives."""
        return [
            self.duration(op.operation, work, op.sms, serial=op.config is None)
            for op, work in zip(period.operations, self.works(period, load), strict=True)
        ]

    def drag(self, period: Period) -> Drag | None:
        """Return the slowdown by concurrent collectives, or None if the period has no collectives."""
        kinds = [self.resource(op.operation) for op in period.operations]
        if Resource.NETWORK not in kinds:
            return None
        factors = [self.interference.drag(kind, op.sms) for kind, op in zip(kinds, period.operations, strict=True)]
        return lambda i, others: factors[i] if any(kinds[j] is Resource.NETWORK for j in others) else 1.0

    def timeline(self, period: Period, load: Load) -> tuple[Timeline, list[float]]:
        """Simulate the period; also returns the milliseconds of each nano-operation."""
        durations = self.durations(period, load)
        timeline = simulate(period, self.spec, durations, self.num_sms, drag=self.drag(period))
        return timeline, list(timeline.lasts)

    def serial_ms(self, load: Load) -> float:
        """Milliseconds of all operations in sequence on the full batch."""
        return sum(
            self.curves.ms(name, work_of(op, load), self.num_sms, serial=True) for name, op in self.operations.items()
        )

    def fastest_serial(self, load: Load) -> Machine:
        """Return the machine of the collectives with which the serial plan is fastest."""
        return min((self, *self.others), key=lambda machine: machine.serial_ms(load))

    def resource(self, operation: str) -> Resource:
        return self.operations[operation].resource

    # -- `Bench`

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        work = work_of(self.operations[op.operation], load._replace(tokens=op.end - op.begin))
        ms = self.curves.ms(op.operation, work, op.sms, serial=op.config is None)
        joules = self.curves.joules(op.operation, work, op.sms, serial=op.config is None)
        return Timing(ms, joules / ms * 1e3, 0.0)

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        ms = []
        for op in (a, b):
            work = work_of(self.operations[op.operation], load._replace(tokens=op.end - op.begin))
            ms.append(self.duration(op.operation, work, op.sms))
        return Timing(ms[0], self.watts, 0.0), Timing(ms[1], self.watts, 0.0)

    def period(self, period: Period, load: Load) -> Timing:
        """Predict time and energy. Energy is the sum over operations alone, capped by the card's highest power."""
        timeline, _ = self.timeline(period, load)
        joules = sum(
            self.curves.joules(op.operation, work, self.num_sms, serial=op.config is None)
            for op, work in zip(period.operations, self.works(period, load), strict=True)
        )
        return Timing(timeline.ms, min(joules / timeline.ms * 1e3, self.watts), 0.0)
