"""The measured `MidConfig`s, where `mid_hopper` was faster than the choice without a table.

`weft.tools.kernels.mid_tuning` wrote `TABLE`, next to this file, on an H200.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.kernels.matmul.mid_config import MidConfig

BUCKETS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
PARTLY_LIVE = {64: 40, 128: 80, 192: 160, 256: 224} | {b: b - (64 if b <= 1024 else 192) for b in BUCKETS if b > 256}
"""Live tokens in a bucket (that of a captured graph) that is not full."""
SUBSTITUTES = {192: 256}
"""Buckets measured for one model only, with the bucket that serves other models. Only live tokens are loaded, which was
faster in each of 18 configurations with all tokens live."""
TABLE = Path(__file__).with_name("mid_h200.json")
MACHINE = ((9, 0), 132)  # The (compute capability, SMs) of TABLE.

Key = tuple[int, int, int]  # (bucket, features, depth)


def decoded(rows: Mapping[str, Sequence[int]]) -> dict[Key, MidConfig]:
    """Return a table from its JSON form: `"tokens,features,depth"` -> fields of a `MidConfig`. Raises `ValueError`."""
    table = {}
    for key, row in rows.items():
        tokens, features, depth = map(int, key.split(","))
        config = MidConfig(*map(int, row))
        assert config.pieces
        table[tokens, features, depth] = config
    return table


@functools.cache
def _shipped() -> dict[Key, MidConfig]:
    return decoded(json.loads(TABLE.read_text())) if TABLE.exists() else {}


def lookup(tokens: int, features: int, depth: int) -> MidConfig | None:
    """Return the measured configuration, or None if none is known to beat the choice of `gemm_launch.choose`."""
    if tokens <= BUCKETS[0] // 2 or tokens > BUCKETS[-1]:
        return None
    bucket = next(b for b in BUCKETS if tokens <= b)
    found = _row(bucket, features, depth)
    if found is None and (other := _row(SUBSTITUTES.get(bucket, bucket), features, depth)) is not None:
        return other._replace(box=32)
    return found


def _row(bucket: int, features: int, depth: int) -> MidConfig | None:
    return _shipped().get((bucket, features, depth))
