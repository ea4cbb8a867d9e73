"""`Sources`: the bytes of an image that a request names: inline, by URL, an uploaded file, a local file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weft.server.api.media.addresses import FetchRefused
from weft.server.api.media.fetch import Fetcher
from weft.server.api.media.parts import ImagePart

_DATA = re.compile(r"data:[^,]{0,256},", re.IGNORECASE)
_SPACE = str.maketrans("", "", " \t\r\n")
SMALL = 2**16  # characters of base64 that are decoded on the event loop

OpenFile = Callable[[str], Path | None]
"""The content of an uploaded file of the request's owner, by id."""


class Sources:
    def __init__(self, fetcher: Fetcher | None, local: Path | None, max_bytes: int) -> None:
        """`fetcher`: None if URLs are off. `local`: the folder of local files; None if they are off."""
        self._fetcher, self._local, self._max_bytes = fetcher, local, max_bytes

    @staticmethod
    def label(part: ImagePart) -> str:
        """Where an image comes from, for metrics: data, url, file, local."""
        if part.kind == "file":
            return part.kind
        scheme = part.source[:5].lower()
        return {"data:": "data", "file:": "local"}.get(scheme, "url")

    async def read(self, part: ImagePart, files: OpenFile | None) -> bytes:
        """Raises `FetchRefused`."""
        match self.label(part):
            case "data":
                return await self._decode(part.source)
            case "file":
                return await self._uploaded(part.source, files)
            case "local":
                if self._local is None:
                    raise FetchRefused("this server reads no local files (--allowed-local-media-path)")
                return await asyncio.to_thread(self._read, self._inside(part.source))
        if not part.source.lower().startswith(("http:", "https:")):
            raise FetchRefused("its URL must be a data: or https: URL")
        if self._fetcher is None:
            raise FetchRefused("this server fetches no URLs (--image-urls); send a data: URL")
        return await self._fetcher.get(part.source)

    async def _decode(self, url: str) -> bytes:
        head = _DATA.match(url)
        if head is None:
            raise FetchRefused("its data: URL has no comma")
        if not head[0][:-1].lower().endswith(";base64"):
            raise FetchRefused("its data: URL must be base64")
        if (len(url) - head.end()) * 3 // 4 > self._max_bytes * 1.1 + 3:
            raise self._too_large()
        text = url[head.end() :]
        decode = _from_base64
        data = decode(text) if len(text) <= SMALL else await asyncio.to_thread(decode, text)
        return self._bounded(data)

    async def _uploaded(self, id: str, files: OpenFile | None) -> bytes:
        if files is None:
            raise FetchRefused("this server stores no files (--files-dir)")
        path = await asyncio.to_thread(files, id)
        if path is None:
            raise FetchRefused("there is no file with this id")
        return await asyncio.to_thread(self._read, path)

    def _inside(self, url: str) -> Path:
        """The path of a file: URL. Raises `FetchRefused` unless it leads into the folder, links resolved."""
        try:
            parts = urlsplit(url)
            assert self._local is not None
            if parts.netloc not in ("", "localhost") or "\0" in (name := unquote(parts.path)):
                raise ValueError
            path, root = Path(name).resolve(), self._local.resolve()
        except (ValueError, OSError, RuntimeError):
            raise FetchRefused("its file: URL is invalid") from None
        if not path.is_relative_to(root):
            raise FetchRefused("its file is outside the folder of --allowed-local-media-path")
        return path

    def _read(self, path: Path) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise FetchRefused("it is not a regular file")
                if found.st_size > self._max_bytes:
                    raise self._too_large()
                return self._bounded(file.read(self._max_bytes + 1))
        except OSError:
            raise FetchRefused("its file cannot be read") from None

    def _bounded(self, data: bytes) -> bytes:
        if len(data) > self._max_bytes:
            raise self._too_large()
        return data

    def _too_large(self) -> FetchRefused:
        return FetchRefused(f"it is larger than {self._max_bytes / 2**20:g} MiB")


def _from_base64(text: str) -> bytes:
    """Decode base64 with or without padding, line ends and URL-safe characters. Raises `FetchRefused`."""
    text = text.translate(_SPACE)
    if "%" in text:
        text = unquote(text)
    try:
        data = text.rstrip("=").replace("-", "+").replace("_", "/").encode("ascii")
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise FetchRefused("its base64 is invalid") from None
