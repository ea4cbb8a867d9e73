"""`Way`: how the partial sums that a product leaves on every rank become sums (NanoFlow §4.1.2).

All ways give the same activations and, where they are offered, send the same bytes: what an all-reduce sends, two
gathers send. They differ in what waits for what, and in which weights a rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from weft.engine.errors import ModelError
from weft.engine.model.operations import (
    ALL_REDUCE,
    Operation,
    Role,
    all_gather,
    reduce_scatter,
)  # fmt: skip

Way = Literal["all_reduce", "scatter_gather", "two_gathers"]
"""all_reduce: `X_reduce` adds up.
scatter_gather: `X_scatter` adds up each rank's columns, `X_gather` collects them.
two_gathers: `X_gather_in` collects the input of `X_columns`, the product cut by its output columns instead of its inner
dimension; nothing is to be added, and `X_gather` collects the columns.
"""


def ways(operations: Iterable[Operation], ranks: int) -> dict[str, tuple[Way, ...]]:
    """What is possible for each all-reduce of a layer, by its name.

    Two gathers only behind a single dense product whose input is no wider than its output: they would send more than
    the all-reduce does.
    """
    found: dict[str, tuple[Way, ...]] = {}
    adders: list[Operation] = []
    for op in operations:
        if op.kernel == ALL_REDUCE:
            found[op.name] = ("all_reduce", "scatter_gather")
            if [a.role for a in adders] == [Role.PRODUCT] and _can_gather(adders[0], ranks):
                found[op.name] += ("two_gathers",)
            adders = []
        elif op.role in (Role.PRODUCT, Role.EXPERTS) and op.target == "x":
            adders.append(op)
    return found


def summed_alone(operations: Iterable[Operation]) -> list[Operation]:
    """The dense products of a layer that an all-reduce follows which adds up nothing else."""
    found: list[Operation] = []
    adders: list[Operation] = []
    for op in operations:
        if op.kernel == ALL_REDUCE:
            found += adders if [a.role for a in adders] == [Role.PRODUCT] else []
            adders = []
        elif op.target == "x":
            adders.append(op)
    return found


def _can_gather(op: Operation, ranks: int) -> bool:
    return op.out % ranks == 0 and op.inner * ranks <= op.out


def with_ways(operations: Iterable[Operation], chosen: Mapping[str, str], ranks: int) -> Iterator[Operation]:
    """The operations of a layer with these ways instead of all-reduces. Raises `ModelError` where one is impossible."""
    listed = list(operations)
    possible = ways(listed, ranks)
    for name, way in chosen.items():
        if way not in possible.get(name, ()):
            known = "; ".join(f"{n}: {', '.join(w)}" for n, w in possible.items()) or "it has no collectives"
            raise ModelError(f"this model cannot do {name} as {way} on {ranks} ranks ({known})")
    product_of = {op.name: op.parents[0] for op in listed if op.kernel == ALL_REDUCE}
    columns = {product_of[name] for name, way in chosen.items() if way == "two_gathers"}
    # who needed the sum needs what collects it
    ends = {name: f"{product_of[name]}_gather" for name, way in chosen.items() if way != "all_reduce"}
    for op in listed:
        parents = tuple(ends.get(p, p) for p in op.parents)
        if op.name in columns:
            gather = f"{op.name}_gather_in"
            width = op.inner * ranks
            yield all_gather(gather, parents, width, ranks, of=op.source)
            yield replace(
                op, name=f"{op.name}_columns", parents=(gather,), out=op.out // ranks, inner=width,
                moved=op.out // ranks + width,
            )  # fmt: skip
        elif op.name in ends:
            own = product_of[op.name]
            width = op.moved // 2
            if own in columns:
                before = f"{own}_columns"
            else:
                before = f"{own}_scatter"
                yield reduce_scatter(before, parents, width, ranks)
            yield all_gather(ends[op.name], (before,), width, ranks)
        else:
            yield replace(op, parents=parents)
