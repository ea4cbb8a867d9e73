"""`BatchLine`: one request of an OpenAI batch file, and the line that answers it; `RequestFile` and `AnswerFile`."""

from __future__ import annotations

import fcntl
import os
import uuid
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import orjson

from weft.server.bodies import parse_json
from weft.server.errors import clip

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
BEGINNING = '{"id":"batch_req_'  # the start of every answer line
MAX_ID = 512  # characters of a custom_id


class LineError(Exception):
    """An invalid request line. `code` and `param` are OpenAI's."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


class BatchLine(NamedTuple):
    custom_id: str
    url: str  # one of `ENDPOINTS`
    body: dict[str, Any]


def parse(line: bytes, endpoint: str | None = None) -> BatchLine:
    """Parse a request line. Raises `LineError`. `endpoint`: the required url, by default any of `ENDPOINTS`."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise LineError(f"is not JSON ({clip(str(error))})", "invalid_json_line") from None
    if not isinstance(value, dict):
        raise LineError("is not a JSON object", "invalid_json_line")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise LineError(f"needs a custom_id of 1 to {MAX_ID} characters", "invalid_custom_id", "custom_id")
    if value.get("method", "POST") != "POST":
        raise LineError("has a method other than POST", "invalid_method", "method")
    url, body = value.get("url"), value.get("body")
    if url not in ENDPOINTS or (endpoint is not None and url != endpoint):
        wanted = endpoint or " or ".join(ENDPOINTS)
        raise LineError(f"has the url {clip(url)}, not {wanted}", "invalid_url", "url")
    if not isinstance(body, dict):
        raise LineError("needs a body that is an object", "invalid_body", "body")
    if body.get("stream"):
        raise LineError("asks for a stream, which batches do not support", "invalid_body", "body.stream")
    return BatchLine(custom_id, url, body)


def answer(line: BatchLine, request_id: str, status: int, body: bytes) -> bytes:
    """The line of an HTTP answer, including errors."""
    try:
        value = orjson.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": value}
    return _encode(line.custom_id, response, None)


def failure(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request without an HTTP answer."""
    return _encode(custom_id, None, {"code": code, "message": message})


def succeeded(line: Any) -> bool:
    """Whether a parsed answer line reports success."""
    response = line.get("response") if isinstance(line, dict) else None
    return isinstance(response, dict) and response.get("status_code") == 200


def _encode(custom_id: str, response: Any, error: Any) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex[:24]}"
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


MAX_ERRORS = 100  # errors reported per file


class RequestFile:
    """A checked request file. Do not run a file with errors."""

    def __init__(self, path: Path, endpoint: str | None = None, most: int | None = None) -> None:
        """`endpoint`: the required url. `most`: maximum number of requests. Raises `OSError`."""
        self.errors: list[tuple[int, LineError]] = []  # the first errors, with line numbers from 1
        self.models: set[str] = set()  # model names in the requests
        self.ids: frozenset[str] = frozenset()  # the custom_ids of a file without errors
        self._ends = array("Q", [0])
        self._lines = array("Q")  # numbers, from 0, of the non-empty lines
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


class NoAnswers(Exception):
    """The file was not written by this module, or another process is writing it."""


class AnswerFile:
    """Can be open in one process at a time. Opening it cuts off an incomplete last line."""

    def __init__(self, path: Path) -> None:
        """Raises `NoAnswers` and `OSError`."""
        self.done: set[str] = set()  # the answered custom_ids
        self.failed = 0  # the number of them that failed
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
