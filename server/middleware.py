"""Pure ASGI layers around the app: what holds for every request, whatever its path. Outermost first: `Trace`,
`Authorise`, `BodyLimit`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import ApiError
from weft.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""what probes and scrapers reach without a key; everything else needs one"""

ENDPOINTS = frozenset(
    {
        *OPEN_PATHS,
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
    }
)
"""values of the metrics label; other paths count as "other" """

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Trace:
    """Gives each request its id and arrival (`scope["weft.request_id"]`, `["weft.arrival"]`), counts its status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id") or ""
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope["weft.request_id"] = request_id
        scope["weft.arrival"] = time.perf_counter()
        status = 499  # the client left before there was an answer

        async def traced_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, traced_send)
        except Exception:
            status = 500
            raise
        finally:
            endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
            self._metrics.requests.labels(endpoint, str(status)).inc()


class Authorise:
    """Lets through who presents a key; decides on `scope["path"]`, and denies by default.

    Paths below /admin/ take the admin key and no other; without one they do not exist.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._admin_keys = [_digest(admin_key)] if admin_key is not None else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if path == "/admin" or path.startswith("/admin/"):
            if not self._admin_keys:
                return ApiError(404, "There is nothing at this path.")
            keys = self._admin_keys
        elif path in OPEN_PATHS or not self._keys:
            return None
        else:
            keys = self._keys
        scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and _matches(key.strip(), keys):
            return None
        what = "Incorrect API key." if key else "This server needs an API key: Authorization: Bearer KEY."
        return ApiError(401, what, code="invalid_api_key")


class BodyLimit:
    """Refuses a body that is too large, by its header or while it streams in.

    What is still on its way is read and dropped for a while: a client that is cut off never sees the answer.
    """

    DISCARD_SECONDS = 5.0

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._error = ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length") or ""
        if length.isdigit() and int(length) > self._max_bytes:
            if _header(scope, b"expect") is None:
                await self._discard(receive)
            await self._error.response()(scope, receive, send)
            return
        size = 0

        async def limited_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                if message.get("more_body"):
                    await self._discard(receive)
                raise self._error
            return message

        await self._app(scope, limited_receive, send)

    async def _discard(self, receive: Receive) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.DISCARD_SECONDS):
                while (await receive()).get("more_body"):
                    pass


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _matches(key: str, digests: Sequence[bytes]) -> bool:
    presented = hashlib.sha256(key.encode("latin-1")).digest()
    return sum(hmac.compare_digest(presented, digest) for digest in digests) > 0  # compares all, whichever matches
