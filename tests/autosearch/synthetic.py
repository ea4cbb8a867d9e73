"""A machine defined by formulas, close to an H200: GEMMs in waves of tiles, attention by a bandwidth curve,
slowdowns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.pipeline_structure import every_operation
from weft.autosearch.profile import PairPoint, Point, Profile, work_of
from weft.autosearch.simulate import Drag, play, simulate
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.parts import Norm
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import NanoOperation, Period, Target, model_key

# TB/s of decode attention by number of SMs
BANDWIDTH = ([0, 16, 24, 32, 40, 48, 56, 64, 132], [0, 1.29, 1.87, 2.44, 2.93, 3.42, 3.82, 4.09, 4.3])


def spec_of(hidden: int, inter: int, layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> ModelSpec:
    return ModelSpec(
        "LlamaForCausalLM", 128256, hidden, inter, layers, heads, kv_heads, head_dim, 8192, Norm(1e-5), (Rope(5e5),),
        "bfloat16",
    )  # fmt: skip


LLAMA_8B = spec_of(4096, 14336, 32, 32, 8)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_theta": 5e5, "torch_dtype": "bfloat16",
}  # fmt: skip
TYPICAL = Load(2048, 683, 1280, 1024)


@dataclass(frozen=True, slots=True)
class VariantSpec(ModelSpec):
    """A model with other operations in its layers."""

    operations: tuple[Operation, ...] = ()

    def layer_operations(self, layer: int = -1) -> Iterator[Operation]:  # noqa: ARG002
        yield from self.operations


def with_operations(spec: ModelSpec, operations: Sequence[Operation]) -> VariantSpec:
    values = {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}
    return VariantSpec(**values, operations=tuple(operations))


def target_for(spec: ModelSpec, sms: int = 132) -> Target:
    return Target("Synthetic H200", sms, model_key(spec), "bfloat16", "none")


class SyntheticBench:
    """See `Bench`. Counts its measurements."""

    num_sms = 132
    memory = 0
    seconds = 0.0

    def __init__(self, spec: ModelSpec, *, compute_slowdown: float = 1.10, guest_slowdown: float = 1.06) -> None:
        self.spec = spec
        self.calls = 0
        self._operations = every_operation(spec)
        self._slow = {True: compute_slowdown, False: guest_slowdown}

    def clock(self) -> float:
        """Seconds. A measurement takes two and a solver none, so that a busy machine does not change a test."""
        return 2.0 * self.calls

    def ms(self, op: Operation, work: float, sms: int) -> float:
        if work <= 0:
            return 0.0
        if op.role is Role.PROJECTION:
            waves = -(-(-(-int(work) // 128) * -(-op.out // 256)) // sms)
            return 0.003 + waves * 2 * 128 * 256 * op.inner / (660e12 / 132) * 1e3
        if op.role is Role.DECODE_ATTENTION:
            rate = float(np.interp(sms, *BANDWIDTH))
            return (
                0.004 + work * KvLayout.of(self.spec, 1, torch.bfloat16).token_bytes / self.spec.num_layers / rate / 1e9
            )
        if op.role is Role.NETWORK:
            return 0.005 + work * op.sent * 2 / (300e6 * min(1.0, sms / 16))
        return 0.004 + work * 4 * self.spec.num_heads * self.spec.head_dim / (450e9 * sms / 132)

    def _duration(self, op: NanoOperation, work: float) -> float:
        ms = self.ms(self._operations[op.operation], work, op.sms)
        overlapped = op.sms < self.num_sms
        return ms * (self._slow[self._operations[op.operation].resource is Resource.COMPUTE] if overlapped else 1.0)

    def _works(self, period: Period, load: Load) -> list[float]:
        ranges = period.nano_batches(self.spec)
        assigned = dict(zip(ranges, load.assigned(ranges), strict=True))
        return [
            work_of(
                self._operations[op.operation],
                assigned.get((op.begin, op.end), load._replace(tokens=max(0, min(op.end, load.tokens) - op.begin))),
            )
            for op in period.operations
        ]

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        self.calls += 1
        part = load._replace(tokens=op.end - op.begin)
        operation = self._operations[op.operation]
        watts = {Resource.COMPUTE: 690.0, Resource.MEMORY: 656.0, Resource.NETWORK: 300.0}[operation.resource]
        return Timing(self.ms(operation, work_of(operation, part), op.sms), watts, 1500.0)

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        self.calls += 1
        times = []
        for op in (a, b):
            part = load._replace(tokens=op.end - op.begin)
            times.append(Timing(self._duration(op, work_of(self._operations[op.operation], part)), 700.0, 1430.0))
        return times[0], times[1]

    def period(self, period: Period, load: Load) -> Timing:
        self.calls += 1
        durations = [self._duration(op, w) for op, w in zip(period.operations, self._works(period, load), strict=True)]
        return Timing(simulate(period, self.spec, durations, self.num_sms).ms, 700.0, 1430.0)


def small_profile(
    spec: ModelSpec,
    load: Load,
    ms: Callable[[str, float, int], float],
    *,
    sms: int = 16,
    slowdown: float = 1.0,
    levels: tuple[int, ...] = (8, 16),
) -> Profile:
    """A profile of a formula `ms(operation, work, sms)` at every 128 tokens, for small oracles."""
    points, pairs = [], []
    operations = list(spec.layer_operations())
    for op in operations:
        for tokens in range(128, load.tokens + 1, 128):
            decodes = load.decodes * tokens // load.tokens
            work = work_of(op, load._replace(tokens=tokens, decodes=decodes))
            points += [Point(op.name, work, s, ms(op.name, work, s), 100.0, 1000.0) for s in levels if work]
    for op in operations:
        for guest in operations:
            if op.resource is Resource.COMPUTE and guest.resource is not Resource.COMPUTE:
                works = work_of(op, load), work_of(guest, load)
                for s in levels:
                    if s < sms:
                        a, b = ms(op.name, works[0], sms - s) * slowdown, ms(guest.name, works[1], s) * slowdown
                        pairs.append(PairPoint(op.name, guest.name, *works, sms - s, s, a, b, 100.0))
    features = {o.name: 0 for o in operations}
    return Profile(target_for(spec, sms), load, features, tuple(points), tuple(pairs))


def assert_schedule_is_possible(
    period: Period, spec: ModelSpec, durations: Sequence[float], num_sms: int, drag: Drag | None = None
) -> None:
    """Replays the simulation and checks every rule independently, over all layers."""
    layers = 12
    runs = play(period, spec, durations, num_sms, layers, drag)
    begun = {(r.turn, r.operation): r for r in runs}
    assert sorted(turn + period.operations[i].next_layer for turn, i in begun) == sorted(
        list(range(1, layers + 1)) * len(period.operations)
    )
    slack = 1e-9
    assert all(r.end - r.start >= durations[r.operation] - slack for r in runs)
    for edge in period.dependencies(spec):
        for turn in range(layers + 1):
            after, before = begun.get((turn, edge.after)), begun.get((turn + edge.distance, edge.before))
            if after is not None and before is not None:
                assert before.end <= after.start + slack
    for lane in {op.lane for op in period.operations}:
        own = sorted((r.start, r.end) for r in runs if period.operations[r.operation].lane == lane)
        assert all(a[1] <= b[0] + slack for a, b in pairwise(own))
    for now in {r.start for r in runs}:
        busy = sum(period.operations[r.operation].sms for r in runs if r.start <= now < r.end - slack)
        assert busy <= num_sms
