"""`MidConfig`: how `mid_hopper` cuts a product of 64 to 1,792 tokens, and the measured table. No Triton is needed.

`TABLE` beside this file is what `weft.kernels.mid_tuning` wrote on an H200: where these kernels were quicker.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

BLOCK_TOKENS, BLOCK_DEPTH = 128, 64
SHARED_BYTES = 232448 - 1024
"""of a program, but for its barriers"""
MAX_STAGES = 8
MAX_SPLIT = 8
"""parts whose bits lie in one word"""
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
RULED_TOKENS = 512
"""up to which `by_rule` was held against measurements"""
FEWEST_UNITS = 32
"""tiles of the smallest product that was measured"""
PATIENCE = 20000
"""how often a part looks for the others: some 10 ms"""
BUCKETS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792)
PARTLY = {64: 40, 128: 80, 256: 160} | {b: b - (64 if b <= 1024 else 192) for b in BUCKETS if b > 256}
"""tokens that are live where a bucket, which is that of a captured graph, is not full"""
TABLE = Path(__file__).with_name("mid_h200.json")
MACHINE = ((9, 0), 132)
"""(compute capability, SMs) that TABLE is for"""

Key = tuple[int, int, int]
"""(bucket, features, depth)"""


class MidConfig(NamedTuple):
    """Tiles of 128 tokens."""

    width: int
    """features of a tile: 64 to 256 in steps of 32; 64, 128 or 256 where the depth is cut. Narrower ones would
    leave more sums of squares than `projections.sumsq_buffer` has rows"""
    split: int = 1
    """programs that share one tile's depth"""
    ahead: int = 0
    """steps of the weight that a program asks the L2 for while the kernel before still runs"""
    box: int = BLOCK_TOKENS
    """tokens that are loaded at a time: 128, or 32, then as many boxes as hold live ones"""

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The width as powers of two, largest first; 0 for none. Raises `ValueError` if no tile is so wide."""
        found, left = [], self.width
        for size in (256, 128, 64, 32):
            if size <= left:
                found.append(size)
                left -= size
        cut = self.split > 1
        if left or not 64 <= self.width <= 256 or (cut and len(found) > 1):
            raise ValueError(f"no tile is {self.width} features wide with its depth in {self.split} parts")
        if self.box not in (32, BLOCK_TOKENS):
            raise ValueError(f"no tile's tokens are loaded {self.box} at a time")
        return tuple((*found, 0, 0)[:3])  # type: ignore[return-value]

    def stages_for(self, kind: str, *, whole: bool) -> int:
        """Steps of both operands that fit beside what the epilogue of a `kind` keeps in shared memory.

        whole: the depth is not cut, and results leave through shared memory.
        """
        kept = BLOCK_TOKENS * self.width * (1 if kind == "gate_up" else 2) if whole else 0
        return min(MAX_STAGES, (SHARED_BYTES - kept) // ((BLOCK_TOKENS + self.width) * BLOCK_DEPTH * 2))

    def parts_of(self, depth: int) -> int:
        """`split`, or fewer for a depth of fewer steps: no part is empty."""
        return min(self.split, -(-depth // BLOCK_DEPTH))

    def units(self, tokens: int, features: int, depth: int) -> int:
        """Parts of tiles."""
        return -(-tokens // BLOCK_TOKENS) * -(-features // self.width) * self.parts_of(depth)


def part_of(part: int, parts: int, steps: int) -> tuple[int, int]:
    """(first step, behind the last one) of a tile's depth that a part adds up, as `mid_hopper` has it."""
    return part * steps // parts, (part + 1) * steps // parts


def candidates(tokens: int, features: int, depth: int, num_sms: int) -> tuple[MidConfig, ...]:
    """What is worth a measurement: what fills the waves of SMs that it takes best, whole and cut, wide tiles first."""
    whole = [MidConfig(w) for w in WIDTHS]
    cut = [
        MidConfig(w, s)
        for w in (256, 128, 64)
        for s in range(2, MAX_SPLIT + 1)
        if depth // BLOCK_DEPTH >= 4 * s and MidConfig(w, s).units(tokens, features, depth) <= 2 * num_sms
    ]

    cost = partial(_cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)
    whole, cut = sorted(whole, key=cost), sorted(cut, key=cost)
    boxed = [config._replace(box=32) for config in whole[:3] + cut[:2]]
    best = sorted(whole[:3] + cut[:4], key=cost)
    return (*best, best[0]._replace(ahead=4), *boxed)


def _cost(c: MidConfig, *, tokens: int, features: int, depth: int, num_sms: int) -> float:
    """About the time: steps of the fullest SM, each as long as its operands take or its products."""
    waves = -(-c.units(tokens, features, depth) // num_sms)
    step = max(c.width * BLOCK_TOKENS * 0.0000182, (c.width + BLOCK_TOKENS) * 0.00195)
    added = 0.0 if c.split == 1 else 3.0 + 2 * c.width * 0.008
    return waves * (depth / BLOCK_DEPTH / c.split) * step + added


def by_rule(tokens: int, features: int, depth: int, num_sms: int) -> MidConfig | None:
    """For a shape that was not measured: the whole tiles that fill waves best. None where that is not known to pay.

    Of 48 products of three models with 128 to 512 tokens it says something of 46. For 36 that was the quickest of all
    that was tried, on the mean 0.4 % slower than it, and never slower than the choice without a table, which took 1.22
    times as long (BENCHMARKS.md, products of 64 to 512 tokens). Deep products of few tiles lost to cut ones.
    """
    if not BUCKETS[0] < tokens <= RULED_TOKENS:
        return None
    cost = partial(_cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)
    best = min(map(MidConfig, WIDTHS), key=cost)
    units = best.units(tokens, features, depth)
    deep = tokens <= BLOCK_TOKENS and depth >= 8192 and units < 0.6 * num_sms
    return None if deep or units < FEWEST_UNITS else best


class Meeting:
    """The word in which the parts of a tile meet: the twin of `mid_hopper._shares` and `_gone`, step by step.

    Each call is one atomic operation of the kernel; a test lets parts make them in any order.
    """

    def __init__(self, parts: int) -> None:
        self.parts, self.word = parts, 0

    def add(self, number: int) -> int:
        before = self.word
        self.word += number
        return before

    def arrive(self) -> tuple[int, bool, int]:
        """(parts that are there, whether this is the last, shares of those that gave up)."""
        before = self.add(1)
        arrived = (before & 255) + 1
        is_last = arrived == self.parts
        return arrived, is_last, (before >> 8) & 255 if is_last else 0

    def look(self) -> int:
        return self.add(0) & 255

    def give_up(self, part: int) -> int:
        """Parts that are there: all of them, if the last came after all."""
        return self.add(256 << part) & 255

    def leave(self) -> None:
        if self.add(65536) >> 16 == self.parts - 1:
            self.word = 0


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
    return _used.get((bucket, features, depth)) or _shipped().get((bucket, features, depth))
