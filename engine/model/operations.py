"""`Operation`: one operation of a layer as data: what it is, what it needs, what it costs.

Plans, the search, the cost model and the executors ask for roles, resources and costs, never for names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
"""kernels of the collectives"""


class Resource(Enum):
    """What an operation is short of (NanoFlow §3)."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


class Role(Enum):
    """What an operation is to the layer."""

    PRODUCT = "product"
    """a matrix product with its epilogue, on any range of tokens"""
    EXPERTS = "experts"
    """a product with many matrices, a few of them for each token; on any range of tokens"""
    DECODE_ATTENTION = "decode attention"
    """of requests with one new token: reads all their keys and values"""
    PREFILL_ATTENTION = "prefill attention"
    """of chunks; reads keys that earlier tokens of the same iteration wrote"""
    NETWORK = "network"
    """a collective between ranks"""

    @property
    def attends(self) -> bool:
        """Its requests are assigned to nano-batches together with those of every other attention of the layer."""
        return self in (Role.DECODE_ATTENTION, Role.PREFILL_ATTENTION)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a layer. Costs count numbers and FLOPs, not bytes: dtypes are the engine's choice."""

    name: str
    role: Role
    resource: Resource
    parents: tuple[str, ...]
    """operations of the same layer that must be done before"""
    kernel: str = ""
    """what launches it: a key of the devices' launcher tables"""
    source: str = ""
    """the activation that it reads"""
    target: str = ""
    """the activation that it writes"""
    out: int = 0
    inner: int = 0
    """its matrix is `[out, inner]`; 0 where it has none"""
    parameters: int = 0
    """numbers in its weights"""
    flops: int = 0
    """of one token; of one pair of a query and a key for attention"""
    moved: int = 0
    """numbers that one token reads and writes beside weights and cached keys and values"""
    sent: int = 0
    """numbers that one rank sends to the others for one token"""


def product(
    name: str, parents: tuple[str, ...], out: int, inner: int, *, kernel: str = "", source: str = "", target: str = ""
) -> Operation:
    """A dense product `[T, inner] -> [T, out]`: reads its input once, writes its output once."""
    return Operation(
        name, Role.PRODUCT, Resource.COMPUTE, parents, kernel, source, target, out, inner,
        parameters=out * inner, flops=2 * out * inner, moved=out + inner,
    )  # fmt: skip


def experts(
    name: str, parents: tuple[str, ...], out: int, inner: int, count: int, top: int,
    *, kernel: str, source: str, target: str,
) -> Operation:  # fmt: skip
    """`count` matrices `[out, inner]`, `top` of them for each token: all are read, few computed with."""
    return Operation(
        name, Role.EXPERTS, Resource.COMPUTE, parents, kernel, source, target, out, inner,
        parameters=count * out * inner, flops=2 * top * out * inner, moved=top * (out + inner),
    )  # fmt: skip


def attention(name: str, role: Role, resource: Resource, parents: tuple[str, ...], width: int) -> Operation:
    """Attention of queries `[T, width]`: reads them, writes as much; 4 FLOPs a number and key."""
    return Operation(name, role, resource, parents, name, "q", "a", flops=4 * width, moved=2 * width)


def all_reduce(name: str, parents: tuple[str, ...], width: int, ranks: int) -> Operation:
    """Adds up the partial sums `[T, width]` that products leave on every rank, and adds them to the stream.

    A rank sends the pieces that others add up, and its own sum to all of them: twice what a gather sends (§3.2).
    """
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
    """Collects the columns of the activation `of`, `[T, width]`, of which every rank has a piece."""
    piece = _to_others(width, ranks)
    return Operation(name, Role.NETWORK, Resource.NETWORK, parents, ALL_GATHER, of, of, moved=width, sent=piece)


def _to_others(width: int, ranks: int) -> int:
    """Of `width` numbers, those that belong to other ranks."""
    return width * (ranks - 1) // ranks
