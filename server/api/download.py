"""`Download`: a stored file as an answer, whole or the requested `Range`."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from weft.server.errors import ApiError

UNNAMED = "file"


class Download(FileResponse):
    """Starlette's file response with this server's error body. An invalid `Range` is ignored (RFC 9110)."""

    def __init__(self, path: Path, media_type: str, filename: str) -> None:
        super().__init__(path, media_type=media_type, headers={"content-disposition": disposition(filename)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ApiError`, before anything is sent."""

        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                raise _Refused(message)
            await send(message)

        try:
            await super().__call__(scope, receive, checked)
        except _Refused as refusal:
            if refusal.status == 416:
                size = Path(self.path).stat().st_size
                raise ApiError(
                    416,
                    f"The requested range is outside the file, which has {size} bytes.",
                    code="range_not_satisfiable",
                    headers={"Content-Range": f"bytes */{size}"},
                ) from None
            headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
            await super().__call__({**scope, "headers": headers}, receive, send)


class _Refused(Exception):
    def __init__(self, message: Message) -> None:
        super().__init__()
        self.status: int = message["status"]


def base_name(name: str) -> str:
    """An upload's file name without folders (of either path style) and unprintable characters."""
    last = "".join(c for c in re.split(r"[/\\]", name)[-1] if c.isprintable()).strip()
    return UNNAMED if last in ("", ".", "..") else last


def disposition(name: str) -> str:
    """The Content-Disposition that saves a file under this name (RFC 6266)."""
    name = base_name(name)
    plain = re.sub(r'[^ -~]|["%]', "_", name)
    return f'attachment; filename="{plain}"' + ("" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}")
