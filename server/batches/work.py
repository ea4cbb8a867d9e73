"""`Work`: a running batch: its requests, its answers and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

from weft.server.batches import lines
from weft.server.batches.files import Files
from weft.server.batches.lines import AnswerFile, BatchLine, NoAnswers, RequestFile
from weft.server.batches.records import Batch, Batches, Counts

MAX_REQUESTS = 50_000


class Work:
    """The state of one batch in progress, in the process that owns the folder. Hold `lock` around methods that may
    block on the disk, which threads run."""

    def __init__(self, batch: Batch, requests: RequestFile, good: AnswerFile, bad: AnswerFile) -> None:
        self.batch, self._requests, self._good, self._bad = batch, requests, good, bad
        self._lines: Iterator[BatchLine] = iter(requests)
        self._unwritten: deque[tuple[BatchLine, bytes, bool]] = deque()
        """Answers that the disk did not take, at most one per request in progress."""
        self._failure: tuple[str, str] | None = None
        self.lock = asyncio.Lock()
        self.written = True  # the disk took the last answer
        self.exhausted = False  # all requests have been started
        self.open = 0  # requests in progress
        self.not_before = 0.0  # `time.monotonic()` before which no request is started
        self.saved = 0.0
        self.changed = False
        self._count()

    def _count(self) -> None:
        counts = Counts(len(self._requests), len(self._good.done), len(self._bad.done))
        self.changed |= counts != self.batch.request_counts
        self.batch.request_counts = counts

    def next(self) -> BatchLine | None:
        """The next request without an answer."""
        line = next((line for line in self._lines if not self._answered(line)), None)
        self.exhausted = line is None
        return line

    def _answered(self, line: BatchLine) -> bool:
        return line.custom_id in self._good.done or line.custom_id in self._bad.done

    def collect(self, line: BatchLine, answer: bytes, *, failed: bool) -> None:
        """Add an answer, which `write` writes."""
        self._unwritten.append((line, answer, failed))

    def add(self, line: BatchLine, answer: bytes, *, failed: bool) -> None:
        """Add an answer and write it. See `write`."""
        self.collect(line, answer, failed=failed)
        self.write()

    def write(self) -> None:
        """Write the added answers. If that raises `OSError`, they are kept."""
        self.written = False
        try:
            while self._unwritten:
                line, answer, failed = self._unwritten[0]
                (self._bad if failed else self._good).add(line.custom_id, answer, failed=failed)
                self._unwritten.popleft()
            self.written = True
        finally:
            self._count()

    def fail(self, code: str, message: str) -> None:
        """Fail the batch."""
        self._failure = code, message
        self._lines = iter(())
        self.exhausted = True

    def fail_rest(self, code: str, message: str) -> None:
        """Answer all remaining requests with this error. Raises `OSError`; repeatable."""
        self.write()
        self._lines = iter(())
        self.exhausted = True
        for line in self._requests:
            if not self._answered(line):
                self._bad.add(line.custom_id, lines.failure(line.custom_id, code, message), failed=True)
        self._count()

    def save(self, batches: Batches) -> None:
        """Save the progress. Raises `OSError`."""
        batches.save(self.batch)
        self.saved, self.changed = time.monotonic(), False

    def finish(self, status: str, files: Files, batches: Batches) -> None:
        """End the batch. Raises `OSError`."""
        if self._failure is not None:
            status, self.batch.errors = "failed", [_error(*self._failure)]
        self.close(sync=True)
        self.batch.error_file_id = f"file-{self.batch.id[6:]}" if self._bad.done else None
        # An id that differs from the error file's and is the same if this is repeated.
        self.batch.output_file_id = f"file-{self.batch.id[6:][::-1]}" if self._good.done else None
        self.batch.enter("finalizing")
        finalize(self.batch, status, files, batches)

    def close(self, *, sync: bool = False) -> None:
        with ExitStack() as closing:  # close all of them even if one fails
            closing.callback(self._requests.close)
            closing.callback(self._good.close, sync=sync)
            closing.callback(self._bad.close, sync=sync)


def finalize(batch: Batch, status: str, files: Files, batches: Batches) -> None:
    """Move the answers to the file store, then set the final status. Repeatable after a kill."""
    batch.next_status = status
    batches.save(batch)
    for id, kind in ((batch.output_file_id, "out"), (batch.error_file_id, "err")):
        path = batches.output(batch.id, kind)
        if id is not None and (path.exists() or files.content(id).exists()):
            name = f"{batch.id}_{'output' if kind == 'out' else 'error'}.jsonl"
            files.take(path, filename=name, purpose="batch_output", owner=batch.owner, kept=batch.kept, id=id)
        path.unlink(missing_ok=True)
    batch.enter(status)
    batches.save(batch)


def begin(batch: Batch, files: Files, batches: Batches) -> Work | None:
    """Resume a batch from any state. Returns None if that ended it. Raises `OSError`."""
    if batch.status == "finalizing":
        finalize(batch, batch.next_status or "completed", files, batches)
        return None
    with ExitStack() as opened:  # closed and unlocked if anything fails
        try:
            if files.get(batch.input_file_id, batch.owner) is None:
                raise FileNotFoundError
            requests = RequestFile(files.content(batch.input_file_id), batch.endpoint, MAX_REQUESTS)
        except FileNotFoundError:
            _failed(batch, batches, _error("invalid_file", "The input file no longer exists.", "input_file_id"))
            return None
        opened.callback(requests.close)
        if requests.errors:
            errors = (_error(e.code, f"Line {n} {e.message}.", e.param, n) for n, e in requests.errors)
            _failed(batch, batches, *errors)
            return None
        try:
            good = AnswerFile(batches.output(batch.id, "out"))
            opened.callback(good.close)
            bad = AnswerFile(batches.output(batch.id, "err"))
            opened.callback(bad.close)
        except NoAnswers as error:
            _failed(batch, batches, _error("output_unreadable", f"The output file is unusable: {error}."))
            return None
        work = Work(batch, requests, good, bad)
        if batch.status == "validating":
            batch.enter("in_progress")
        work.save(batches)
        opened.pop_all()
        return work


def _failed(batch: Batch, batches: Batches, *errors: dict[str, object]) -> None:
    batch.errors = list(errors)
    batch.enter("failed")
    batches.save(batch)


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, object]:
    return {"code": code, "message": message, "param": param, "line": line}
