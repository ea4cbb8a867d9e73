"""What stage I chooses among: which operations are cut where, on token ranges of open sizes; which collectives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.sums import ways
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


def transformations(spec: ModelSpec) -> list[ModelSpec]:
    """The model as it is, then with every other choice of collectives (§4.1.2).

    For a dense model on several ranks: two all-reduces; two all-gathers and one all-reduce; and either with the halves
    of an all-reduce apart, a reduce-scatter and an all-gather.
    """
    possible = ways(spec.layer_operations(), spec.shard_of.ranks)
    choices = (zip(possible, chosen, strict=True) for chosen in product(*possible.values()))
    changes = ({name: way for name, way in choice if way != "all_reduce"} for choice in choices)
    return [replace(spec, sums=tuple(sorted(c.items()))) if c else spec for c in changes]


def described(spec: ModelSpec) -> str:
    """The collectives of a layer in order, for the reader: `o: all-gather, all-gather; down: all-reduce`."""
    words = {"all_reduce": "all-reduce", "scatter_gather": "reduce-scatter, all-gather"}
    words["two_gathers"] = "all-gather, all-gather"
    chosen = dict(spec.sums)
    plain = replace(spec, sums=())
    names = ways(plain.layer_operations(), spec.shard_of.ranks)
    return "; ".join(f"{n.removesuffix('_reduce')}: {words[chosen.get(n, 'all_reduce')]}" for n in names)


def every_operation(spec: ModelSpec, collectives: Collection[str] | None = None) -> dict[str, Operation]:
    """Those of the model and of all its `transformations`, by name: what a profile is to know.

    collectives: leaves transformations out that have others than these.
    """
    variants = [list(variant.layer_operations()) for variant in transformations(spec)]
    return {
        o.name: o
        for operations in variants
        if collectives is None or all(o.role is not Role.NETWORK or o.kernel in collectives for o in operations)
        for o in operations
    }
