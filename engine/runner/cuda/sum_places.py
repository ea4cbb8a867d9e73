"""`SumPlace`: where products of a rank leave the partial sums that all ranks add up.

There are two places of `[T, H]`, which take turns: see `kernels/collectives/peer.py` for why two are enough. That holds for
each token by itself. Between two sums of one place lies one of the other for the same token, which needs the first on
every rank: so nano-batches, which are ranges of tokens, may be as far apart as a pipeline likes. The last sum of an
iteration and the embedding's of the next may have one place: the samplers' exchange, which every iteration has, is
between.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.model.operations import ALL_REDUCE, Role
from weft.engine.model.spec import ModelSpec

OF_EMBEDDING = 0
"""the place of an iteration's first sum"""


class SumPlace(NamedTuple):
    """Of an operation that leaves partial sums, or adds up those of all ranks."""

    turn: int
    """0 or 1"""
    first: bool
    """what lies there is of an earlier sum: a product writes over it"""
    last: str
    """the last product of the sum: a norm behind it follows the sum"""


def sum_places(spec: ModelSpec) -> list[dict[str, SumPlace]]:
    """By layer, then by name of the operation; empty for a model that one rank has whole."""
    turn, found = 1 - OF_EMBEDDING, []
    for layer in range(spec.num_layers if spec.shard_of.ranks > 1 else 0):
        places: dict[str, SumPlace] = {}
        leaving: list[str] = []
        for op in spec.layer_operations(layer):
            if op.kernel == ALL_REDUCE:
                places[op.name] = SumPlace(turn, False, leaving[-1])
                turn, leaving = 1 - turn, []
            elif op.role in (Role.PRODUCT, Role.EXPERTS) and op.target == "x":
                places[op.name] = SumPlace(turn, not leaving, op.name)
                leaving.append(op.name)
        found.append(places)
    return found
