"""`read_index`: which file of a checkpoint holds which tensor, by the index that comes with several files."""

from __future__ import annotations

from pathlib import Path

import msgspec


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(path: Path) -> dict[str, str]:
    """File by tensor. Raises `OSError`, and `ValueError`, one line, for what is no such index."""
    return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
