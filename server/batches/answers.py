"""`AnswerFile`: the answers of a batch, a line each, appended one at a time; whoever is killed goes on behind them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

import orjson

from weft.server.batches.lines import BEGINNING, succeeded


class NoAnswers(Exception):
    """The file is not what this module writes, or another process writes it. The message says which."""


class Answers(Protocol):
    """What takes answers."""

    done: set[str]
    """the custom_ids that are answered"""

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None: ...


class AnswerFile:
    """Open for one process at a time. A line that a killed process left half written is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        """Raises `NoAnswers`, and `OSError`."""
        self.done: set[str] = set()
        """the custom_ids that are answered"""
        self.failed = 0
        """how many of them by an error"""
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
        """Take in the lines that are there; returns where the last whole one ends."""
        size = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    if line[: len(BEGINNING)] != BEGINNING.encode()[: len(line)]:
                        raise NoAnswers(f"its line {number} is no answer of a batch, and no part of one")
                    break
                try:
                    value = orjson.loads(line)
                    name, _ = value["custom_id"], value["response"]
                    hash(name)
                except (ValueError, TypeError, LookupError):
                    raise NoAnswers(f"its line {number} is no answer of a batch") from None
                if name not in self.done:
                    self.done.add(name)
                    self.failed += not succeeded(value)
                size += len(line)
        return size

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Raises `OSError`; the file then ends behind the line before."""
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
        """`sync`: on the disk, not only out of this process's hands. Raises `OSError`; it is closed all the same."""
        try:
            if sync:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
