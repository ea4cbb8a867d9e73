"""`read_index`: reads the index of a checkpoint with several files."""

from __future__ import annotations

from pathlib import Path

import msgspec


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(path: Path) -> dict[str, str]:
    """Return file by tensor name. Raises `OSError`, or `ValueError`, one line, for a malformed index."""
    return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
