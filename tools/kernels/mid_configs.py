"""The `MidConfig`s that `mid_tuning` measures, and the file form of their table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from weft.kernels.matmul.mid_config import BLOCK_DEPTH, BLOCK_TOKENS, MAX_SPLIT, TALL, TALL_WIDTH, WIDTHS, MidConfig
from weft.kernels.matmul.mid_rule import MIN_STAGES, cost
from weft.kernels.matmul.mid_table import Key


def candidates(kind: str, tokens: int, features: int, depth: int, num_sms: int) -> tuple[MidConfig, ...]:
    """Return the configurations worth measuring: those that fill waves of SMs best, whole and split, wide first."""
    time = partial(cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)

    def of(rows: int) -> tuple[list[MidConfig], list[MidConfig]]:
        widths = [
            w
            for w in WIDTHS
            if (rows == BLOCK_TOKENS or w <= TALL_WIDTH)
            and MidConfig(w, rows=rows).stages_for(kind, whole=True) >= MIN_STAGES
        ]
        parts = [
            MidConfig(w, s, rows=rows)
            for w in (256, 128, 64)
            for s in range(2, MAX_SPLIT + 1)
            if w in widths and depth // BLOCK_DEPTH >= 4 * s
        ]
        cut = [config for config in parts if config.units(tokens, features, depth) <= 2 * num_sms]
        return sorted((MidConfig(w, rows=rows) for w in widths), key=time), sorted(cut, key=time)

    whole, cut = of(BLOCK_TOKENS)
    boxed = [config._replace(box=32) for config in whole[:3] + cut[:2]]
    best = sorted(whole[:3] + cut[:4], key=time)
    tall = of(TALL) if tokens > BLOCK_TOKENS and -tokens % TALL <= -tokens % BLOCK_TOKENS else ([], [])
    return (*best, best[0]._replace(ahead=4), *tall[0][:3], *tall[1][:2], *boxed)


def encoded(table: Mapping[Key, MidConfig]) -> str:
    """Return the JSON form, one row per line."""
    rows = (f'  "{",".join(map(str, key))}": {json.dumps(list(config))}' for key, config in sorted(table.items()))
    return "{\n" + ",\n".join(rows) + "\n}\n"
