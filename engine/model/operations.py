"""`Operation`: describes one operation of a layer as data: its role, dependencies and cost.

Plans, the search, the cost model and the executors use roles, resources and costs, never names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
"""Kernel names of the collectives."""


class Resource(Enum):
    """The resource that bounds an operation (NanoFlow §3)."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


class Role(Enum):
    """The function of an operation in a layer."""

    PROJECTION = "projection"  # A GEMM with its epilogue, on any range of tokens.
    EXPERTS = "experts"  # A GEMM with many matrices, a few of them for each token; on any range of tokens.
    DECODE_ATTENTION = "decode attention"  # For requests with one new token: reads all their keys and values.
    PREFILL_ATTENTION = "prefill attention"
    """For chunks; also reads keys that earlier tokens of the same iteration wrote."""
    STATE_STEP = "state step"  # For requests with one new token: reads their recurrent states and writes the next ones.
    STATE_SCAN = "state scan"  # For chunks: carries the states of their requests over all their tokens.
    NETWORK = "network"  # A collective between ranks.

    @property
    def attends(self) -> bool:
        """Whether it mixes a request's tokens; all such operations of a layer have the same requests in a
        nano-batch."""
        return self in (Role.DECODE_ATTENTION, Role.PREFILL_ATTENTION, Role.STATE_STEP, Role.STATE_SCAN)

    @property
    def keeps_state(self) -> bool:
        """Whether it reads and writes recurrent states."""
        return self in (Role.STATE_STEP, Role.STATE_SCAN)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a layer. Costs count values and FLOPs, not bytes, because the engine chooses dtypes."""

    name: str
    role: Role
    resource: Resource
    parents: tuple[str, ...]  # Operations of the same layer that must finish first.
    kernel: str = ""  # Key in the devices' launcher tables.
    source: str = ""  # The activation that it reads.
    target: str = ""  # The activation that it writes.
    out: int = 0
    inner: int = 0  # Its matrix is `[out, inner]`; 0 if it has none.
    parameters: int = 0  # Number of weights.
    flops: int = 0  # Per token; for attention per pair of query and key.
    moved: int = 0  # Values read and written per token, without weights, cached keys and values, and states.
    sent: int = 0  # Values that one rank sends to the others per token.


def projection(
    name: str, parents: tuple[str, ...], out: int, inner: int, *, kernel: str = "", source: str = "", target: str = ""
) -> Operation:
    """A dense GEMM `[T, inner] -> [T, out]`, which reads its input once and writes its output once."""
    return Operation(
        name, Role.PROJECTION, Resource.COMPUTE, parents, kernel, source, target, out, inner,
        parameters=out * inner, flops=2 * out * inner, moved=out + inner,
    )  # fmt: skip


def experts(
    name: str, parents: tuple[str, ...], out: int, inner: int, count: int, top: int,
    *, kernel: str, source: str, target: str,
) -> Operation:  # fmt: skip
    """`count` matrices `[out, inner]`, `top` of them for each token: all are read, few are computed with."""
    return Operation(
        name, Role.EXPERTS, Resource.COMPUTE, parents, kernel, source, target, out, inner,
        parameters=count * out * inner, flops=2 * top * out * inner, moved=top * (out + inner),
    )  # fmt: skip


def attention(name: str, role: Role, resource: Resource, parents: tuple[str, ...], width: int) -> Operation:
    """Attention for queries `[T, width]`: reads and writes as many values; 4 FLOPs per value and key."""
    return Operation(name, role, resource, parents, name, "q", "a", flops=4 * width, moved=2 * width)


def state(
    name: str, role: Role, resource: Resource, parents: tuple[str, ...], inner: int, width: int, values: int
) -> Operation:
    """A recurrence from `[T, inner]` to `[T, width]` with `values` numbers in a request's state, which each token
    updates and reads."""
    return Operation(name, role, resource, parents, name, "q", "m", flops=6 * values, moved=inner + width)


def all_reduce(name: str, parents: tuple[str, ...], width: int, ranks: int) -> Operation:
    """Add up the partial sums `[T, width]` of all ranks, and add the result to the stream.

    A rank sends the pieces that others add up, and its own sum to all of them: twice what a gather sends (§3.2)."""
    piece = _to_others(width, ranks)
    return Operation(
        name, Role.NETWORK, Resource.NETWORK, parents, ALL_REDUCE, "x", "x",
        flops=piece, moved=2 * width, sent=2 * piece,
    )  # fmt: skip


def reduce_scatter(name: str, parents: tuple[str, ...], width: int, ranks: int) -> Operation:
    """The first half of an all-reduce: each rank adds up the partial sums of its own columns of `[T, width]`."""
    piece = _to_others(width, ranks)
    return Operation(
        name, Role.NETWORK, Resource.NETWORK, parents, REDUCE_SCATTER, "x", "x", flops=piece, moved=width, sent=piece
    )


def all_gather(name: str, parents: tuple[str, ...], width: int, ranks: int, *, of: str = "x") -> Operation:
    """Collect the columns of the activation `of`, `[T, width]`, of which every rank has a piece."""
    piece = _to_others(width, ranks)
    return Operation(name, Role.NETWORK, Resource.NETWORK, parents, ALL_GATHER, of, of, moved=width, sent=piece)


def _to_others(width: int, ranks: int) -> int:
    """Return how many of `width` values belong to other ranks."""
    return width * (ranks - 1) // ranks
