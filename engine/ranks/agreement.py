"""What ranks agree on at startup."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
import xxhash

from weft.engine.errors import RankLost
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.options.resolve import ResolvedConfig

_COLUMNS = ("the model", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--page-size", "--plan")


def agree(collectives: Collectives, config: ResolvedConfig, model: str, *, store: bool) -> tuple[ResolvedConfig, bool]:
    """Return the configuration with the page count that fits every rank, and whether every rank has a store.

    model: see `memory.model_id`. Raises `RankLost` if ranks have different settings."""
    plan = msgspec.json.encode(config.plan) if config.plan is not None else b""
    sizes = (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens, config.kv.page_size)
    same = (_number(model.encode()), *sizes, _number(plan))
    pages = config.num_pages if config.num_pages is not None else 0
    every = collectives.all_gather(torch.tensor([*same, pages, store], dtype=torch.int64))
    for rank, row in enumerate(every.tolist()):
        for name, here, there in zip(_COLUMNS, every[0].tolist(), row, strict=False):
            if here != there:
                raise RankLost(f"rank {rank} disagrees with rank 0 about {name}: start again")
    least = int(every[:, -2].min())
    return replace(config, num_pages=least or None), bool(every[:, -1].all())


def barrier(collectives: Collectives) -> None:
    """Wait until every rank has reached this point. Raises `RankLost` if one has ended."""
    collectives.all_gather(torch.zeros(1, dtype=torch.int64))


def _number(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1
