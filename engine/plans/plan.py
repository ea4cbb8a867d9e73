"""`Plan`: how the nano-operations of one layer are assigned to lanes, SMs and time (NanoFlow §4.1). A JSON file.

A plan describes one layer period. An operation that is marked `next_layer` already belongs to the layer after, so the
pipeline wraps around: while one nano-batch is in its attention, another goes through the matrices of this layer and the
first of the next. Unrolled over the model, everything that a nano-operation needs comes before it in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.sums import Way
from weft.engine.plans.document import read_document
from weft.kernels.matmul.gemm_config import GemmConfig

VERSION = 1
TOKEN_STEP = 128
"""token ranges begin and end at multiples of this (paper §4.1.2)"""
MAX_NANO_BATCHES = 8

Lane = Literal["compute", "memory", "network"]
"""a stream; the row of the pipeline picture"""


def by_name(spec: ModelSpec) -> dict[str, Operation]:
    """The operations of a layer, in order."""
    return {o.name: o for o in spec.layer_operations()}


class NanoOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operation on one token range."""

    operation: str
    """a name of `ModelSpec.layer_operations`"""
    begin: int
    end: int
    """tokens `[begin, end)` of the dense batch"""
    sms: int
    """SMs it may use"""
    lane: Lane = "compute"
    next_layer: bool = False
    config: GemmConfig | None = None
    """kernel configuration of a matrix product; None: the kernel's own choice"""

    @property
    def label(self) -> str:
        return f"{self.operation}[{self.begin}:{self.end}]" + ("'" if self.next_layer else "")


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The pipeline for one kind of iteration: at most `tokens` tokens whose decodes read `min_kv_tokens` or more."""

    tokens: int
    """the token bucket: the iteration is padded up to it"""
    operations: tuple[NanoOperation, ...]
    waits: tuple[Edge, ...] = ()
    """orders that no data asks for: operations of two lanes whose SMs do not fit beside each other"""
    offload: str = ""
    """a product: full pages leave for the host while it runs, a few in each layer (paper §4.2.2); "": at once"""
    min_tokens: int = 1
    min_kv_tokens: int = 0
    """KV tokens of all decodes together: decodes x mean context, the attention's work"""
    max_kv_tokens: int = 2**62
    figures: dict[str, float] = {}
    """what the search predicted and measured: milliseconds a layer, joules, gain over the serial plan"""

    def ranges(self, operation: str) -> tuple[tuple[int, int], ...]:
        """The token ranges that an operation is cut into, in token order."""
        return tuple(sorted((o.begin, o.end) for o in self.operations if o.operation == operation))

    def nano_batches(self, spec: ModelSpec) -> tuple[tuple[int, int], ...]:
        """The token ranges that attention is cut into, in token order; all attention of a layer is cut alike."""
        return self.ranges(next((o.name for o in spec.layer_operations() if o.role.attends), ""))

    @property
    def gate(self) -> NanoOperation | None:
        """The first part of the `offload` operation: pages leave for the host from its beginning on."""
        return next((o for o in self.operations if o.operation == self.offload and o.begin == 0), None)

    @property
    def begins(self) -> tuple[int, ...]:
        """Where the token ranges begin, in order."""
        return tuple(sorted({o.begin for o in self.operations}))

    def dependencies(self, spec: ModelSpec) -> Iterator[Edge]:
        """What each operation of the period waits for: parents whose token ranges intersect (paper §4.1.2).

        Prefill attention also reads keys that earlier tokens of the same iteration wrote, so it waits for the QKV
        product of every range up to its own end. The first operation waits for the last of the layer before.
        """
        known = by_name(spec)
        first, *_, last = known
        for i, op in enumerate(self.operations):
            for j, other in enumerate(self.operations):
                wraps = op.operation == first and other.operation == last
                if other.operation not in known[op.operation].parents and not wraps:
                    continue
                begin = 0 if known[op.operation].role is Role.PREFILL_ATTENTION else op.begin
                if other.begin < op.end and begin < other.end:
                    # layers between the two, in periods: 0 when both are of the same unrolled period
                    yield Edge(j, i, int(op.next_layer) - int(other.next_layer) - int(wraps))
        yield from self.waits

    def check(self, spec: ModelSpec, num_sms: int | None = None) -> None:
        """Raise `ConfigError` unless this computes every operation on every token once, in a possible order."""
        operations = by_name(spec)
        for op in self.operations:
            if op.operation not in operations:
                raise ConfigError(
                    f"a plan names the operation {op.operation!r}; this model has {', '.join(operations)}"
                )
            if not 0 <= op.begin < op.end <= self.tokens:
                raise ConfigError(f"{op.label}: the token range must lie in [0, {self.tokens})")
            if op.begin % TOKEN_STEP or (op.end % TOKEN_STEP and op.end != self.tokens):
                raise ConfigError(f"{op.label}: token ranges must be multiples of {TOKEN_STEP}")
            if op.sms < 1 or (num_sms is not None and op.sms > num_sms):
                raise ConfigError(f"{op.label}: {op.sms} SMs, the GPU has {num_sms}")
            if op.lane == "network" and operations[op.operation].resource is not Resource.NETWORK:
                raise ConfigError(f"{op.label}: only operations of the network belong to the network lane")
        if self.offload and self.offload not in {o.name for o in operations.values() if o.role is Role.PRODUCT}:
            raise ConfigError(f"a plan copies to the host beside {self.offload!r}, which is no product of this model")
        for name in operations:
            at = 0
            for begin, end in self.ranges(name):
                if begin != at:
                    raise ConfigError(f"a plan must compute {name} once for every token; [{at}, {begin}) is not")
                at = end
            if at != self.tokens:
                raise ConfigError(f"a plan must compute {name} once for every token; [{at}, {self.tokens}) is not")
        if len({self.ranges(o.name) for o in operations.values() if o.role.attends}) > 1:
            raise ConfigError("a plan must cut decode and prefill attention into the same token ranges")
        if len(self.begins) > MAX_NANO_BATCHES:
            raise ConfigError(
                f"token ranges begin at {len(self.begins)} places, at most {MAX_NANO_BATCHES} are possible"
            )
        if any(not 0 <= i < len(self.operations) for edge in self.waits for i in edge[:2]):
            raise ConfigError(f"a plan waits for an operation that it does not have (it has {len(self.operations)})")
        lanes = {op.lane for op in self.operations if operations[op.operation].resource is Resource.NETWORK}
        if len(lanes) > 1:  # on two, each rank could run another one first, and wait for the others for ever
            raise ConfigError(f"a plan must have all collectives on one lane, not on {' and '.join(sorted(lanes))}")
        for edge in self.dependencies(spec):
            before, after = self.operations[edge.before], self.operations[edge.after]
            # `distance` periods earlier: always launched before; in the same period: the order of the list decides
            if edge.distance > 0 or (edge.distance == 0 and edge.before >= edge.after):
                raise ConfigError(f"a plan launches {after.label} before {before.label}, which it needs")


class Edge(NamedTuple):
    """`operations[after]` needs `operations[before]` of `distance` unrolled periods away (0: the same, -1: before)."""

    before: int
    after: int
    distance: int


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was made for. A plan for anything else is refused."""

    gpu: str
    sms: int
    model: str
    """`model_key` of the spec"""
    dtype: str
    kernels: str
    """digest of the kernels' source: configurations and timings belong to it"""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan file: periods for the token buckets and attention loads where they beat the serial plan."""

    target: Target
    workload: str
    periods: tuple[Period, ...]
    version: int = VERSION
    format: Literal["weft-plan"] = "weft-plan"
    dense_batch: int = 0
    """tokens of an iteration that the pipelines were made for; the engine's limit unless its operator sets one"""
    made: str = ""
    """date, versions, seconds of search: for the reader"""
    sums: dict[str, Way] = {}
    """all-reduces that are done in another way, in the serial plan too: which weights a rank has may depend on it"""

    def spec_of(self, spec: ModelSpec) -> ModelSpec:
        """The model with this plan's collectives. Raises `ConfigError` where it cannot have them."""
        bound = replace(spec, sums=tuple(sorted(self.sums.items())))
        try:
            by_name(bound)
        except ModelError as error:
            raise ConfigError(f"a plan of other collectives: {error}") from None
        return bound

    def period_for(self, tokens: int, kv_tokens: int) -> Period | None:
        """The period for an iteration of `tokens` tokens whose decodes read `kv_tokens`; None: run the serial plan."""
        fitting = [
            p
            for p in self.periods
            if p.min_tokens <= tokens <= p.tokens and p.min_kv_tokens <= kv_tokens < p.max_kv_tokens
        ]
        return min(fitting, key=lambda p: p.tokens, default=None)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def model_key(spec: ModelSpec) -> str:
    """The shapes that a plan depends on, readable: of one rank's part where there are several."""
    e = spec.experts
    experts = "" if e is None else f" experts={e.top}/{e.count}x{e.intermediate_size}+{e.shared_size}"
    ranks = f" ranks={spec.shard_of.ranks}" if spec.shard_of.ranks > 1 else ""
    return (
        f"layers={spec.num_layers} hidden={spec.hidden_size} intermediate={spec.intermediate_size} "
        f"heads={spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim} vocab={spec.vocab_size}{experts}{ranks}"
    )


def load_plan(path: Path) -> Plan:
    """Read a plan file. Raises `ConfigError`, one line."""
    return read_document(
        path, Plan, form="weft-plan", version=VERSION, kind="plan", made_by="weft search writes them"
    )  # fmt: skip


def serial_period(spec: ModelSpec, tokens: int, num_sms: int, *, decode_only: bool = False) -> Period:
    """One nano-batch, one lane, all SMs: the fallback, and the oracle of every other plan.

    decode_only: for iterations without prefill chunks; the launch of an empty prefill attention costs small batches.
    """
    left_out = Role.PREFILL_ATTENTION if decode_only else None
    names = [o.name for o in spec.layer_operations() if o.role is not left_out]
    return Period(tokens, tuple(NanoOperation(name, 0, tokens, num_sms) for name in names))
