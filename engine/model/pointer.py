"""Git LFS pointers: the small text that stands where a large file was not downloaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def is_pointer(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as f:
        return f.read(len(_BEGINNING)) == _BEGINNING
    return False


def advice(file: Path) -> str:
    """One line for whoever was given a pointer."""
    return f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}"
