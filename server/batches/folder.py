"""`Folder`: the files and batches in `--files-dir`."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.batches.files import Files
from weft.server.batches.records import Batches


class Folder(NamedTuple):
    files: Files
    batches: Batches

    @classmethod
    def open(cls, path: str, max_gib: float) -> Folder:
        """Open the folder, creating it if needed. Raises `ConfigError`."""
        root = expanded(path)
        try:
            return cls(Files(root, int(max_gib * 2**30)), Batches(root))
        except OSError as error:
            raise ConfigError(f"--files-dir {path} cannot be used: {error.strerror or error}") from None
