"""`Reduction`: how the partial sums that a projection leaves on every rank are added up (NanoFlow §4.1.2).

All reductions compute the same activations and, where available, send the same number of bytes: two gathers send as
much as an all-reduce. They differ in their dependencies and in the weights that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from weft.engine.errors import ModelError
from weft.engine.model.operations import ALL_REDUCE, Operation, Role, all_gather, reduce_scatter

Reduction = Literal["all_reduce", "scatter_gather", "two_gathers"]
"""all_reduce: `X_reduce` adds up all columns.
scatter_gather: `X_scatter` adds up each rank's columns; `X_gather` collects them.
two_gathers: `X_gather_in` collects the input of `X_columns`, the projection split by output columns instead of inner
dimension, which needs no addition; `X_gather` collects the columns."""


def _all_reduces(operations: Iterable[Operation]) -> Iterator[tuple[str, Operation | None]]:
    """Yield the name of each all-reduce, and the only projection that it adds up unless there are several."""
    addends: list[Operation] = []
    for op in operations:
        if op.kernel == ALL_REDUCE:
            yield op.name, addends[0] if [a.role for a in addends] == [Role.PROJECTION] else None
            addends = []
        elif op.role in (Role.PROJECTION, Role.EXPERTS) and op.target == "x":
            addends.append(op)


def possible_reductions(operations: Iterable[Operation], ranks: int) -> dict[str, tuple[Reduction, ...]]:
    """Return the possible reductions for each all-reduce of a layer, by name.

    Two gathers need a single dense projection whose input is no wider than its output; otherwise they would send more
    than the all-reduce."""
    found: dict[str, tuple[Reduction, ...]] = {}
    for name, only in _all_reduces(operations):
        gathers = only is not None and only.out % ranks == 0 and only.inner * ranks <= only.out
        found[name] = ("all_reduce", "scatter_gather", *(("two_gathers",) if gathers else ()))
    return found


def directly_reduced(operations: Iterable[Operation]) -> list[Operation]:
    """Return the dense projections of a layer whose output alone is the input of an all-reduce."""
    return [only for _, only in _all_reduces(operations) if only is not None]


def with_reductions(operations: Iterable[Operation], chosen: Mapping[str, str], ranks: int) -> Iterator[Operation]:
    """Yield the operations of a layer with these reductions. Raises `ModelError` if one is impossible."""
    listed = list(operations)
    possible = possible_reductions(listed, ranks)
    for name, reduction in chosen.items():
        if reduction not in possible.get(name, ()):
            known = "; ".join(f"{n}: {', '.join(w)}" for n, w in possible.items()) or "it has no collectives"
            raise ModelError(f"this model cannot do {name} as {reduction} on {ranks} ranks ({known})")
    projection_of = {op.name: op.parents[0] for op in listed if op.kernel == ALL_REDUCE}
    columns = {projection_of[name] for name, reduction in chosen.items() if reduction == "two_gathers"}
    # The gather takes the place of the all-reduce as a parent.
    ends = {name: f"{projection_of[name]}_gather" for name, reduction in chosen.items() if reduction != "all_reduce"}
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
            own = projection_of[op.name]
            width = op.moved // 2
            if own in columns:
                before = f"{own}_columns"
            else:
                before = f"{own}_scatter"
                yield reduce_scatter(before, parents, width, ranks)
            yield all_gather(ends[op.name], (before,), width, ranks)
        else:
            yield replace(op, parents=parents)
