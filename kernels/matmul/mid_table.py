"""The measured `MidConfig`s: where the kernels of `mid_hopper` were quicker than the choice without a table.

`TABLE` beside this file is what `weft.tools.kernels.mid_tuning` wrote on an H200.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.kernels.matmul.mid_config import MidConfig

BUCKETS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
PARTLY = {64: 40, 128: 80, 192: 160, 256: 224} | {b: b - (64 if b <= 1024 else 192) for b in BUCKETS if b > 256}
"""tokens that are live where a bucket, which is that of a captured graph, is not full"""
UNTRIED = {192: 256}
"""buckets of which one model alone was measured, and whose rows serve the others: with live tokens alone loaded, which
was quicker in each of 18 configurations while all were live"""
TABLE = Path(__file__).with_name("mid_h200.json")
MACHINE = ((9, 0), 132)
"""(compute capability, SMs) that TABLE is for"""

Key = tuple[int, int, int]
"""(bucket, features, depth)"""


def decoded(rows: Mapping[str, Sequence[int]]) -> dict[Key, MidConfig]:
    """A table from its JSON form: `"tokens,features,depth"` -> the fields of a `MidConfig`. Raises `ValueError`."""
    table = {}
    for key, row in rows.items():
        tokens, features, depth = map(int, key.split(","))
        config = MidConfig(*map(int, row))
        assert config.pieces
        table[tokens, features, depth] = config
    return table


def encoded(table: Mapping[Key, MidConfig]) -> str:
    """The JSON form, a row a line."""
    rows = (f'  "{",".join(map(str, key))}": {json.dumps(list(config))}' for key, config in sorted(table.items()))
    return "{\n" + ",\n".join(rows) + "\n}\n"


@functools.cache
def _shipped() -> dict[Key, MidConfig]:
    return decoded(json.loads(TABLE.read_text())) if TABLE.exists() else {}


_used: dict[Key, MidConfig] = {}


def use(table: Mapping[Key, MidConfig]) -> None:
    """From now on `lookup` knows these, beside the shipped ones. Before any graph is captured."""
    _used.update(table)


def lookup(tokens: int, features: int, depth: int) -> MidConfig | None:
    """The measured configuration; None: none is known to be quicker than what `gemm_launch.choose` says."""
    if tokens <= BUCKETS[0] // 2 or tokens > BUCKETS[-1]:
        return None
    bucket = next(b for b in BUCKETS if tokens <= b)
    found = _row(bucket, features, depth)
    if found is None and (other := _row(UNTRIED.get(bucket, bucket), features, depth)) is not None:
        return other._replace(box=32)
    return found


def _row(bucket: int, features: int, depth: int) -> MidConfig | None:
    return _used.get((bucket, features, depth)) or _shipped().get((bucket, features, depth))
