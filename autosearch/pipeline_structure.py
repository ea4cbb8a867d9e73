"""The choices of stage I: where operations are cut into nano-operations, and which collectives a model uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.reductions import possible_reductions
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import MAX_NANO_BATCHES, Lane, NanoOperation, Period

LANES: dict[Resource, Lane] = {Resource.COMPUTE: "compute", Resource.MEMORY: "memory", Resource.NETWORK: "network"}


class Candidate(NamedTuple):
    """A pipeline and its simulated period: time per layer in ms."""

    ms: float
    period: Period


class Structure(NamedTuple):
    """`pieces` consecutive token ranges of variable size. Each operation is cut at some boundaries."""

    pieces: int
    cuts: tuple[tuple[str, tuple[int, ...]], ...]
    """Operation -> boundaries 1 … pieces-1 where it is cut; () leaves it uncut."""

    @property
    def groups(self) -> list[tuple[str, int, int]]:
        """Every nano-operation: (operation, first piece, piece after the last)."""
        out: list[tuple[str, int, int]] = []
        for name, cuts in self.cuts:
            out.extend((name, a, b) for a, b in pairwise((0, *cuts, self.pieces)))
        return out

    def period(self, spec: ModelSpec) -> Period:
        """A period with one token per piece, which has the dependencies of this structure."""
        lanes = {o.name: LANES[o.resource] for o in spec.layer_operations()}
        return Period(self.pieces, tuple(NanoOperation(n, a, b, 1, lanes[n]) for n, a, b in self.groups))

    def split(self, piece: int, operations: Sequence[str]) -> Structure:
        """Split `piece` into two token ranges and cut only these operations at the new boundary."""
        place = piece + 1
        cuts = []
        for name, old in self.cuts:
            moved = tuple(c + 1 if c >= place else c for c in old)
            cuts.append((name, tuple(sorted({*moved, place})) if name in operations else moved))
        return Structure(self.pieces + 1, tuple(cuts))


def attention(spec: ModelSpec) -> tuple[str, ...]:
    """The attention operations. All are cut alike, since a request belongs to one nano-batch."""
    return tuple(o.name for o in spec.layer_operations() if o.role.attends)


def first_structures(spec: ModelSpec) -> Iterator[Structure]:
    """Two nano-batches: with every operation cut, then with every choice of uncut GEMMs."""
    operations = list(spec.layer_operations())
    free = [o.name for o in operations if o.role in (Role.PROJECTION, Role.EXPERTS)]
    by_size = {o.name: o.parameters for o in operations}
    choices = product((True, False), repeat=len(free))
    # fewest uncut weights first
    for choice in sorted(choices, key=lambda c: sum(by_size[n] for n, cut in zip(free, c, strict=True) if not cut)):
        cut = dict(zip(free, choice, strict=True))
        yield Structure(2, tuple((o.name, (1,) if cut.get(o.name, True) else ()) for o in operations))


def can_grow(structure: Structure) -> bool:
    return structure.pieces < MAX_NANO_BATCHES


def transformations(spec: ModelSpec) -> list[ModelSpec]:
    """Return the model unchanged, then with every other choice of collectives (NanoFlow §4.1.2).

    A dense model on several ranks can use two all-reduces, or two all-gathers and one all-reduce. In either case an
    all-reduce can be split into a reduce-scatter and an all-gather."""
    possible = possible_reductions(spec.layer_operations(), spec.shard_of.ranks)
    choices = (zip(possible, chosen, strict=True) for chosen in product(*possible.values()))
    changes = ({name: reduction for name, reduction in choice if reduction != "all_reduce"} for choice in choices)
    return [replace(spec, sums=tuple(sorted(c.items()))) if c else spec for c in changes]


def describe_collectives(spec: ModelSpec) -> str:
    """The collectives of a layer in order, such as `o: all-gather, all-gather; down: all-reduce`."""
    words = {"all_reduce": "all-reduce", "scatter_gather": "reduce-scatter, all-gather"}
    words["two_gathers"] = "all-gather, all-gather"
    chosen = dict(spec.sums)
    plain = replace(spec, sums=())
    names = possible_reductions(plain.layer_operations(), spec.shard_of.ranks)
    return "; ".join(f"{n.removesuffix('_reduce')}: {words[chosen.get(n, 'all_reduce')]}" for n in names)


def every_operation(spec: ModelSpec, collectives: Collection[str] | None = None) -> dict[str, Operation]:
    """Return the operations of the model and all its `transformations`, by name. A profile must cover them.

    collectives: skip transformations that need any other collective kernel; None: skip none."""
    variants = [list(variant.layer_operations()) for variant in transformations(spec)]
    return {
        o.name: o
        for operations in variants
        if collectives is None or all(o.role is not Role.NETWORK or o.kernel in collectives for o in operations)
        for o in operations
    }
