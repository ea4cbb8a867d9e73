"""Transfer of stored files: `Download` as an answer, `receive` from a multipart form that is written as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from weft.server.batches.files import Upload
from weft.server.errors import ApiError, bad_request

UNNAMED = "file"


class Download(FileResponse):
    """Starlette's file response with this server's error body. An invalid `Range` is ignored (RFC 9110)."""

    def __init__(self, path: Path, media_type: str, filename: str) -> None:
        super().__init__(path, media_type=media_type, headers={"content-disposition": disposition(filename)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ApiError`, before anything is sent."""
        status = 200

        async def send_unless_refused(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status < 400:
                await send(message)

        await super().__call__(scope, receive, send_unless_refused)
        if status == 416:
            size = Path(self.path).stat().st_size
            what = f"The requested range is outside the file, which has {size} bytes."
            raise ApiError(416, what, code="range_not_satisfiable", headers={"Content-Range": f"bytes */{size}"})
        if status >= 400:
            headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
            await super().__call__({**scope, "headers": headers}, receive, send)


def base_name(name: str) -> str:
    """An upload's file name without folders (of either path style) and unprintable characters."""
    last = "".join(c for c in re.split(r"[/\\]", name)[-1] if c.isprintable()).strip()
    return UNNAMED if last in ("", ".", "..") else last


def disposition(name: str) -> str:
    """The Content-Disposition that saves a file under this name (RFC 6266)."""
    name = base_name(name)
    plain = re.sub(r'[^ -~]|["%]', "_", name)
    return f'attachment; filename="{plain}"' + ("" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}")


CHUNK_BYTES = 2**20  # bytes to parse and write per call of a thread
DISCARD_SECONDS = 5.0
MAX_FIELDS = 16
MAX_VALUE = 4096  # bytes of a field other than the file


class Form(NamedTuple):
    fields: dict[str, str]
    filename: str  # the base name


class _Parts:
    """Callbacks of the multipart parser. Raises `ValueError` for unexpected forms."""

    def __init__(self, upload: Upload) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.filename: str | None = None
        self._upload = upload
        self._name = b""
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._in_file = False
        self.ended = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add("_header", data[start:end]),
            "on_header_value": lambda data, start, end: self._add("_value", data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._disposition, self._name, self._in_file = b"", b"", False

    def _add(self, to: str, data: bytes) -> None:
        setattr(self, to, getattr(self, to) + data)

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"")
        if self._name == b"file" and b"filename" in options:
            if self.filename is not None:
                raise ValueError("there is more than one file")
            self._in_file = True
            self.filename = base_name(options[b"filename"].decode(errors="replace"))
        elif len(self.fields) >= MAX_FIELDS:
            raise ValueError(f"there are more than {MAX_FIELDS} fields")
        else:
            self.fields[self._name] = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._upload.write(data[start:end])
            return
        self.fields[self._name] += data[start:end]
        if len(self.fields[self._name]) > MAX_VALUE:
            raise ValueError(f"a field has more than {MAX_VALUE} bytes")

    def _end(self) -> None:
        self.ended = True


async def discard(chunks: AsyncIterator[bytes]) -> None:
    """Read and drop the rest of a body for a while, because a client that is cut off never sees the answer."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for _ in chunks:
                pass


async def receive(content_type: str, chunks: AsyncIterator[bytes], upload: Upload) -> Form:
    """Read the form. Raises `ApiError` if it is invalid, and `StoreFull` and `OSError` from the upload."""
    try:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise bad_request("Content-Type must be multipart/form-data, with a boundary.", code="wrong_content_type")
        parts = _Parts(upload)
        parser = MultipartParser(options[b"boundary"], parts.callbacks())  # type: ignore[arg-type]
        buffered: list[bytes] = []
        async for chunk in chunks:
            buffered.append(chunk)
            if sum(map(len, buffered)) >= CHUNK_BYTES:
                await asyncio.to_thread(parser.write, b"".join(buffered))
                buffered = []
        await asyncio.to_thread(parser.write, b"".join(buffered))
        parser.finalize()
        await asyncio.to_thread(upload.end)
    except (FormParserError, ValueError) as error:
        raise bad_request(f"The form cannot be read: {error}.", code="invalid_form") from None
    if not parts.ended:
        raise bad_request("The form is incomplete.", code="invalid_form")
    if parts.filename is None:
        raise bad_request("The form has no file.", "file")
    fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in parts.fields.items()}
    return Form(fields, parts.filename[-255:])
