"""What stage I chooses among: which operations are cut where, on token ranges whose sizes are still open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import NamedTuple

from weft.engine.model.operations import ALL_REDUCE, Operation, Resource, Role, all_gather
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import MAX_NANO_BATCHES, Lane, NanoOperation, Period

LANES: dict[Resource, Lane] = {
    Resource.COMPUTE: "compute",
    Resource.MEMORY: "memory",
    Resource.NETWORK: "network",
}


class Structure(NamedTuple):
    """`pieces` consecutive token ranges of open sizes; every operation is cut at some of the places between them."""

    pieces: int
    cuts: tuple[tuple[str, tuple[int, ...]], ...]
    """operation -> places 1 … pieces-1 where it is cut; () keeps it whole"""

    @property
    def groups(self) -> list[tuple[str, int, int]]:
        """(operation, first piece, piece after the last) of every nano-operation."""
        out: list[tuple[str, int, int]] = []
        for name, cuts in self.cuts:
            out.extend((name, a, b) for a, b in pairwise((0, *cuts, self.pieces)))
        return out

    def period(self, spec: ModelSpec) -> Period:
        """As a period of one token a piece: for its dependencies."""
        lanes = {o.name: LANES[o.resource] for o in spec.layer_operations()}
        return Period(self.pieces, tuple(NanoOperation(n, a, b, 1, lanes[n]) for n, a, b in self.groups))

    def split(self, piece: int, operations: Sequence[str]) -> Structure:
        """One more token range: `piece` becomes two, and of the operations only these are cut between them."""
        place = piece + 1
        cuts = []
        for name, old in self.cuts:
            moved = tuple(c + 1 if c >= place else c for c in old)
            cuts.append((name, tuple(sorted({*moved, place})) if name in operations else moved))
        return Structure(self.pieces + 1, tuple(cuts))


def attention(spec: ModelSpec) -> tuple[str, ...]:
    """The operations that must be cut alike: attention, whose requests are assigned to nano-batches together."""
    return tuple(o.name for o in spec.layer_operations() if o.role.attends)


def first_structures(spec: ModelSpec) -> Iterator[Structure]:
    """Two nano-batches: everything cut, then every choice of products that are kept whole."""
    operations = list(spec.layer_operations())
    free = [o.name for o in operations if o.role in (Role.PRODUCT, Role.EXPERTS)]
    by_size = {o.name: o.parameters for o in operations}
    choices = product((True, False), repeat=len(free))
    # fewest whole matrices first
    for choice in sorted(choices, key=lambda c: sum(by_size[n] for n, cut in zip(free, c, strict=True) if not cut)):
        cut = dict(zip(free, choice, strict=True))
        yield Structure(2, tuple((o.name, (1,) if cut.get(o.name, True) else ()) for o in operations))


def can_grow(structure: Structure) -> bool:
    return structure.pieces < MAX_NANO_BATCHES


@dataclass(frozen=True, slots=True)
class VariantSpec(ModelSpec):
    """A model with other operations in its layers: another way to cut it over GPUs."""

    operations: tuple[Operation, ...] = ()

    def layer_operations(self, layer: int = -1) -> Iterator[Operation]:  # noqa: ARG002
        yield from self.operations


def with_operations(spec: ModelSpec, operations: Sequence[Operation]) -> VariantSpec:
    values = {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}
    return VariantSpec(**values, operations=tuple(operations))


def transformations(spec: ModelSpec) -> list[ModelSpec]:
    """The model and its equivalents: an all-reduce behind a product may be two all-gathers around it (§4.1.2).

    With weights cut by rows a product leaves partial sums, which an all-reduce `X_reduce` adds up. Cut by columns it
    needs its whole input, gathered by `X_gather_in`, and leaves pieces of its output, gathered by `X_gather_out`.
    """
    operations = list(spec.layer_operations())
    # all-reduces, each with the product whose partial sums it adds up
    reduces = {o.name: o.parents[0] for o in operations if o.kernel == ALL_REDUCE}
    out: list[ModelSpec] = [spec]
    for chosen in product((False, True), repeat=len(reduces)):
        gathered = {r: reduces[r] for r, c in zip(reduces, chosen, strict=True) if c}
        if gathered:
            out.append(with_operations(spec, [v for o in operations for v in _gathered(o, gathered)]))
    return out


def _gathered(op: Operation, reduces: Mapping[str, str]) -> Iterator[Operation]:
    """What stands for `op` where these all-reduces (of these products) have become all-gathers."""
    parents = tuple(f"{reduces[p]}_gather_out" if p in reduces else p for p in op.parents)
    if op.name in reduces.values():
        yield all_gather(f"{op.name}_gather_in", parents, op.inner)
        yield replace(op, parents=(f"{op.name}_gather_in",))
    elif op.name in reduces:
        yield all_gather(f"{reduces[op.name]}_gather_out", parents, op.moved // 2)
    else:
        yield replace(op, parents=parents)
