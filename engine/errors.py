"""Errors that a user can act on. Each message is one line that says what to change."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


class WeftError(Exception):
    """Base of every error that weft reports without a traceback."""


class ConfigError(WeftError):
    """An option has a value that cannot work."""


class ModelError(WeftError):
    """A model directory cannot be served: unsupported, incomplete or malformed."""


class UnknownArchitecture(ModelError):
    """No family of weft's own has this architecture; `transformers` may."""


class OutOfMemory(WeftError):
    """The weights or the KV pages do not fit the device."""


class RequestError(WeftError):
    """A request that can never be served as sent. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDead(WeftError):
    """The engine process has ended; no open request will be answered."""


class RankLost(WeftError):
    """A process of tensor parallelism has ended or could not start; the others cannot go on. The message names it."""


def one_line(error: BaseException, most: int = 200) -> str:
    """What another library's error says, in a line of so many characters at most; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def refuse_pointer(file: Path) -> None:
    """Raises `ModelError` when `file` is what Git LFS leaves in place of a large file that was not downloaded."""
    with suppress(OSError), file.open("rb") as f:
        if f.read(len(_POINTER)) == _POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}")
