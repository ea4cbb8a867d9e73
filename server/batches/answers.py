"""`AnswerFile`: the answers of a batch, appended line by line, so that a killed process can resume."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

import orjson

from weft.server.batches.lines import BEGINNING, succeeded


class NoAnswers(Exception):
    """The file was not written by this module, or another process is writing it."""


class Answers(Protocol):
    """Collects answers."""

    done: set[str]
    """The answered custom_ids."""

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None: ...


class AnswerFile:
    """Can be open in one process at a time. Opening it cuts off an incomplete last line."""

    def __init__(self, path: Path) -> None:
        """Raises `NoAnswers` and `OSError`."""
        self.done: set[str] = set()
        """The answered custom_ids."""
        self.failed = 0
        """The number of them that failed."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = self._read(path)
            os.ftruncate(self._fd, self._size)
        except BlockingIOError:
            os.close(self._fd)
            raise NoAnswers("another process is writing it") from None
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, path: Path) -> int:
        """Read the existing lines. Returns the end of the last complete one."""
        size = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    if line[: len(BEGINNING)] != BEGINNING.encode()[: len(line)]:
                        raise NoAnswers(f"line {number} is not part of a batch answer")
                    break
                try:
                    value = orjson.loads(line)
                    name, _ = value["custom_id"], value["response"]
                    hash(name)
                except (ValueError, TypeError, LookupError):
                    raise NoAnswers(f"line {number} is not a batch answer") from None
                if name not in self.done:
                    self.done.add(name)
                    self.failed += not succeeded(value)
                size += len(line)
        return size

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Append a line. If that raises `OSError`, the file is unchanged."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)
        self.done.add(custom_id)
        self.failed += failed

    def close(self, *, sync: bool = False) -> None:
        """Close the file, even if this raises `OSError`. `sync`: flush it to the disk."""
        try:
            if sync:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
