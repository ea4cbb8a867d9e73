"""`Plan`: assigns the nano-operations of one layer to lanes, SMs and time (NanoFlow §4.1). Stored as JSON.

A plan describes one layer period. Operations marked `next_layer` belong to the following layer, so the pipeline wraps
around: while one nano-batch is in attention, another runs the projections of this layer and the first of the next. When
unrolled over the model, all dependencies of a nano-operation precede it in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.reductions import Reduction
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.document import read_document
from weft.kernels.matmul.gemm_config import GemmConfig

VERSION = 1
TOKEN_STEP = 128  # Token ranges begin and end at multiples of this (paper §4.1.2).
MAX_NANO_BATCHES = 8

Lane = Literal["compute", "memory", "network"]  # A stream; a row of the pipeline picture.


def by_name(spec: ModelSpec) -> dict[str, Operation]:
    """Return the operations of a layer by name, in order."""
    return {o.name: o for o in spec.layer_operations()}


class NanoOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operation on one token range."""

    operation: str  # A name from `ModelSpec.layer_operations`.
    begin: int
    end: int  # Runs tokens `[begin, end)` of the dense batch.
    sms: int  # SMs that it may use.
    lane: Lane = "compute"
    next_layer: bool = False
    config: GemmConfig | None = None  # Kernel configuration of a GEMM; None: the kernel's choice.

    @property
    def label(self) -> str:
        return f"{self.operation}[{self.begin}:{self.end}]" + ("'" if self.next_layer else "")


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The pipeline for one kind of iteration: at most `tokens` tokens whose decodes read `min_kv_tokens` or more."""

    tokens: int  # The token bucket: iterations are padded to it.
    operations: tuple[NanoOperation, ...]
    waits: tuple[Edge, ...] = ()
    """Orderings without a data dependency: operations of two lanes whose SMs do not fit together."""
    offload: str = ""
    """A GEMM during which full pages leave for the host, a few per layer (paper §4.2.2); "": at once."""
    min_tokens: int = 1
    min_kv_tokens: int = 0
    """KV tokens of all decodes together: decodes x mean context, the work of decode attention."""
    max_kv_tokens: int = 2**62
    figures: dict[str, float] = {}
    """What the search predicted and measured: milliseconds per layer, joules, gain over the serial plan."""

    def ranges(self, operation: str) -> tuple[tuple[int, int], ...]:
        """Return the token ranges of an operation, in token order."""
        return tuple(sorted((o.begin, o.end) for o in self.operations if o.operation == operation))

    def nano_batches(self, spec: ModelSpec) -> tuple[tuple[int, int], ...]:
        """Return the token ranges of attention, in token order; all attention of a layer has the same ones."""
        return self.ranges(next((o.name for o in spec.layer_operations() if o.role.attends), ""))

    @property
    def gate(self) -> NanoOperation | None:
        """The first range of the `offload` operation: pages leave for the host from its start on."""
        return next((o for o in self.operations if o.operation == self.offload and o.begin == 0), None)

    @property
    def begins(self) -> tuple[int, ...]:
        """Where the token ranges begin, in order."""
        return tuple(sorted({o.begin for o in self.operations}))

    def dependencies(self, spec: ModelSpec) -> Iterator[Edge]:
        """Yield what each operation waits for: parents whose token ranges intersect its own (paper §4.1.2).

        Prefill attention also reads keys that earlier tokens of the same iteration wrote, so it waits for the QKV
        projection of every range up to its end. The first operation waits for the last of the previous layer."""
        known = by_name(spec)
        first, *_, last = known
        for i, op in enumerate(self.operations):
            for j, other in enumerate(self.operations):
                wraps = op.operation == first and other.operation == last
                if other.operation not in known[op.operation].parents and not wraps:
                    continue
                begin = 0 if known[op.operation].role is Role.PREFILL_ATTENTION else op.begin
                if other.begin < op.end and begin < other.end:
                    # Distance in unrolled periods: 0 when both are in the same one.
                    yield Edge(j, i, int(op.next_layer) - int(other.next_layer) - int(wraps))
        yield from self.waits

    def check(self, spec: ModelSpec, num_sms: int | None = None) -> None:
        """Raise `ConfigError` unless this computes every operation once for every token, in a possible order."""
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
                raise ConfigError(f"{op.label}: {op.sms} SMs, but the GPU has {num_sms}")
            if op.lane == "network" and operations[op.operation].resource is not Resource.NETWORK:
                raise ConfigError(f"{op.label}: only network operations belong to the network lane")
        if self.offload and self.offload not in {o.name for o in operations.values() if o.role is Role.PROJECTION}:
            raise ConfigError(f"a plan offloads pages during {self.offload!r}, which is not a GEMM of this model")
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
            raise ConfigError(f"token ranges begin at {len(self.begins)} places; the limit is {MAX_NANO_BATCHES}")
        if any(not 0 <= i < len(self.operations) for edge in self.waits for i in edge[:2]):
            raise ConfigError(f"a plan waits for an operation that it does not have (it has {len(self.operations)})")
        lanes = {op.lane for op in self.operations if operations[op.operation].resource is Resource.NETWORK}
        if len(lanes) > 1:  # with two, ranks could start different collectives and wait for each other forever
            raise ConfigError(f"a plan must have all collectives on one lane, not on {' and '.join(sorted(lanes))}")
        for edge in self.dependencies(spec):
            before, after = self.operations[edge.before], self.operations[edge.after]
            # An operation of an earlier period is always launched before; in the same period list order decides.
            if edge.distance > 0 or (edge.distance == 0 and edge.before >= edge.after):
                raise ConfigError(f"a plan launches {after.label} before {before.label}, which it needs")


class Edge(NamedTuple):
    """`operations[after]` needs `operations[before]` from `distance` unrolled periods away (0: same, -1: previous)."""

    before: int
    after: int
    distance: int


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was made for. A plan for anything else is refused."""

    gpu: str
    sms: int
    model: str  # `model_key` of the spec.
    dtype: str
    kernels: str  # Digest of the kernel sources, for which configurations and timings are valid.


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan file: periods for the token buckets and attention loads where they beat the serial plan."""

    target: Target
    workload: str
    periods: tuple[Period, ...]
    version: int = VERSION
    format: Literal["weft-plan"] = "weft-plan"
    dense_batch: int = 0
    """Iteration size that the pipelines were made for; the engine's token budget unless the operator sets one."""
    made: str = ""  # Date, versions and seconds of the search, for readers.
    sums: dict[str, Reduction] = {}
    """All-reduces that are replaced, in the serial plan too: the weights that a rank loads may depend on it."""

    def spec_of(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with this plan's collectives. Raises `ConfigError` if the model cannot have them."""
        bound = replace(spec, sums=tuple(sorted(self.sums.items())))
        try:
            by_name(bound)
        except ModelError as error:
            raise ConfigError(f"the plan's collectives do not fit: {error}") from None
        return bound

    def period_for(self, tokens: int, kv_tokens: int) -> Period | None:
        """Return the period for an iteration of `tokens` tokens whose decodes read `kv_tokens`; None: serial plan."""
        return min(
            (p for p in self.periods
             if p.min_tokens <= tokens <= p.tokens and p.min_kv_tokens <= kv_tokens < p.max_kv_tokens),
            key=lambda p: p.tokens, default=None,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def model_key(spec: ModelSpec) -> str:
    """Return the shapes that a plan depends on, readable; with several ranks those of one shard."""
    e = spec.experts
    experts = "" if e is None else f" experts={e.top}/{e.count}x{e.intermediate_size}+{e.shared_size}"
    ranks = f" ranks={spec.shard_of.ranks}" if spec.shard_of.ranks > 1 else ""
    return (
        f"layers={spec.num_layers} hidden={spec.hidden_size} intermediate={spec.intermediate_size} "
        f"heads={spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim} vocab={spec.vocab_size}{experts}{ranks}"
    )


def load_plan(path: Path) -> Plan:
    """Read a plan file. Raises `ConfigError`, one line."""
    return read_document(path, Plan, form="weft-plan", version=VERSION, kind="plan", made_by="weft search writes them")


def serial_period(spec: ModelSpec, tokens: int, num_sms: int, *, decode_only: bool = False) -> Period:
    """Return one nano-batch on one lane with all SMs: the fallback, and the reference for every other plan.

    decode_only: for iterations without prefill chunks; launching an empty prefill attention slows small batches."""
    left_out = Role.PREFILL_ATTENTION if decode_only else None
    names = [o.name for o in spec.layer_operations() if o.role is not left_out]
    return Period(tokens, tuple(NanoOperation(name, 0, tokens, num_sms) for name in names))
