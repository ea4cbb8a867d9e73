"""`RequestFile`: the request lines of a batch, all checked before the first one is sent."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from weft.server.batches.lines import BatchLine, LineError, parse
from weft.server.errors import clip

MAX_ERRORS = 100
"""Errors reported per file."""


class RequestFile:
    """A checked request file. Do not run a file with errors."""

    def __init__(self, path: Path, endpoint: str | None = None, most: int | None = None) -> None:
        """`endpoint`: the required url. `most`: maximum number of requests. Raises `OSError`."""
        self.errors: list[tuple[int, LineError]] = []
        """The first errors, with line numbers from 1."""
        self.models: set[str] = set()
        """Model names in the requests."""
        self.ids: frozenset[str] = frozenset()
        """The custom_ids of a file without errors."""
        self._ends = array("Q", [0])
        self._lines = array("Q")
        """Numbers, from 0, of the non-empty lines."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        seen: set[str] = set()
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                self._ends.append(self._ends[-1] + len(text))
                if not text.strip():
                    continue
                self._lines.append(number - 1)
                if most is not None and len(self._lines) > most:
                    self.errors.append((number, LineError(f"exceeds the limit of {most} requests", "too_many_tasks")))
                    return
                try:
                    line = parse(text, endpoint)
                    if line.custom_id in seen:
                        what = f"repeats the custom_id {clip(line.custom_id)!r}"
                        raise LineError(what, "duplicate_custom_id", "custom_id")
                except LineError as error:
                    self.errors.append((number, error))
                    if len(self.errors) == MAX_ERRORS:
                        return
                    continue
                seen.add(line.custom_id)
                if isinstance(model := line.body.get("model"), str):
                    self.models.add(model)
        if not self._lines:
            self.errors.append((1, LineError("is missing: the file has no request", "empty_file")))
        self.ids = frozenset(seen)

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[BatchLine]:
        """Read the requests from disk, one at a time."""
        for number in self._lines:
            begin, end = self._ends[number], self._ends[number + 1]
            yield parse(os.pread(self._fd, end - begin, begin))

    def close(self) -> None:
        os.close(self._fd)
