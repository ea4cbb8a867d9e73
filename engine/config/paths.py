"""Paths of caches, presets and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

from weft.engine.errors import ConfigError

PRESETS = Path(__file__).parent.parent / "model" / "presets"
"""Configurations of well-known models, one folder each."""
GGUF_INDEX = "gguf.json"  # file in the model directory of a GGUF file, which weft makes
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
"""A model with a tokenizer has at least one of these files."""


def cache_home() -> Path:
    """Return the folder of data that can be rebuilt. Raises `ConfigError` if the user has no home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    except RuntimeError:
        raise ConfigError(f"user {os.getuid()} has no home directory: set HOME or XDG_CACHE_HOME") from None


def expanded(path: str | Path) -> Path:
    """Expand a leading `~`. Raises `ConfigError` if that home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: unknown home directory; write the full path") from None
