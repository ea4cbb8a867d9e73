"""`SumBuffer`: which of two buffers holds an operation's partial sums until the all-reduce over ranks.

The buffers `[T, H]` alternate; `kernels/collectives/peer.py` explains why two suffice. This holds for each token on its
own: between two sums in one buffer lies a sum of the same token in the other, which needs the first on every rank. So
nano-batches, which are token ranges, may run in any order. The last sum of an iteration and the first of the next may
use the same buffer, because the samplers' exchange is between them.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.model.operations import ALL_REDUCE, Role
from weft.engine.model.spec import ModelSpec

EMBEDDING_BUFFER = 0  # Buffer of an iteration's first sum, the embedding's.


class SumBuffer(NamedTuple):
    """The buffer of an operation that writes partial sums or reduces them over ranks."""

    turn: int  # 0 or 1.
    first: bool  # Overwrite the buffer, which holds an earlier sum.
    last: str  # Name of the sum's last GEMM. Its post-norm applies to the sum.


def sum_buffers(spec: ModelSpec) -> list[dict[str, SumBuffer]]:
    """Return the buffers by layer and operation name; an empty list for a single rank."""
    turn, found = 1 - EMBEDDING_BUFFER, []
    for layer in range(spec.num_layers if spec.shard_of.ranks > 1 else 0):
        places: dict[str, SumBuffer] = {}
        summands: list[str] = []
        for op in spec.layer_operations(layer):
            if op.kernel == ALL_REDUCE:
                places[op.name] = SumBuffer(turn, False, summands[-1])
                turn, summands = 1 - turn, []
            elif op.role in (Role.PROJECTION, Role.EXPERTS) and op.target == "x":
                places[op.name] = SumBuffer(turn, not summands, op.name)
                summands.append(op.name)
        found.append(places)
    return found
