"""ASGI middleware for all requests. Outermost first: `Trace`, `Authorise`, `BodyLimit`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.api import docs, ui
from weft.server.api.aliases import ADMIN_ALIASES, INVOCATIONS, canonical
from weft.server.api.browsers import BrowserChecks
from weft.server.api.connection import TAKE_OVER
from weft.server.api.operations import FAVICON
from weft.server.api.other_fields import IGNORED_HEADER
from weft.server.api.protocol import REQUEST_ID
from weft.server.api.service import Service
from weft.server.batches.files import MAX_FILE_BYTES
from weft.server.bodies import BodyBounds
from weft.server.errors import MAX_ECHO, ApiError
from weft.server.keys import match
from weft.server.observe import tracing
from weft.server.observe.limits import RateLimits
from weft.server.observe.metrics import PROBES, Metrics, endpoint_of

OPEN_PATHS = frozenset(PROBES)
MESSAGES = "/v1/messages"
MODELS = "/v1/models"
OLLAMA = "/api/"
LIMITED_PATHS = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", MESSAGES, INVOCATIONS,
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling",
        "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/completion",
    }
)  # fmt: skip
_REQUEST_ID = re.compile(REQUEST_ID)

NOT_STORED_HEADER = "x-weft-not-stored"
FORM_BYTES = 2**16  # bytes of an upload's body in addition to the file

access = logging.getLogger("weft.access")


class Trace:
    """Assigns each request an id and an arrival time (`scope["weft.request_id"]`, `["weft.arrival"]`), makes its path
    canonical, counts its status, logs it, and records a span.

    `scope["weft.named"]`: the client set the id; otherwise it may still change. `scope["weft.generation"]`: set by
    `Answer`; its `usage()` is logged. `scope["weft.ignored"]`: set by `JsonRequest`, the value of `IGNORED_HEADER`.
    `scope["weft.not_stored"]`: set by `/v1/responses`, the value of `NOT_STORED_HEADER`.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, *, log: bool, spans: tracing.Spans | None, root_path: str = ""
    ) -> None:
        """`root_path`: a prefix of paths to ignore."""
        self._app, self._metrics, self._log, self._spans, self._root_path = app, metrics, log, spans, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = canonical(self._without_root(scope["path"]))
        request_id = _header(scope, b"x-request-id") or ""
        scope["weft.named"] = _REQUEST_ID.fullmatch(request_id) is not None
        scope["weft.request_id"] = request_id if scope["weft.named"] else uuid.uuid4().hex
        scope["weft.arrival"] = time.perf_counter()
        scope["weft.anthropic"] = _is_anthropic(scope)
        scope["weft.ollama"] = scope["path"].startswith(OLLAMA)
        if not _is_address((scope.get("client") or ("",))[0]):  # a proxy forwarded an invalid address
            scope["client"] = None
        context = tracing.parse(_header(scope, b"traceparent"))
        span = None
        if self._spans is not None and scope["path"] not in OPEN_PATHS:
            name = f"{scope['method']} {endpoint_of(scope['path'])}"
            span = self._spans.begin(name, context, _header(scope, b"tracestate"))
        status = 499  # the client disconnected before the answer

        async def traced_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", scope["weft.request_id"].encode())]
                if ignored := scope.get("weft.ignored"):
                    headers.append((IGNORED_HEADER.encode(), ignored.encode()))
                if not_stored := scope.get("weft.not_stored"):
                    headers.append((NOT_STORED_HEADER.encode(), not_stored.encode()))
                if scope["weft.anthropic"]:
                    headers.append((b"request-id", scope["weft.request_id"].encode()))
                if context is not None:
                    headers.append((b"traceparent", context.traceparent.encode()))
                message["headers"] = headers
            await send(message)

        self._metrics.request_began()
        if (take_over := scope.pop(TAKE_OVER, None)) is not None:
            take_over()
        try:
            await self._app(scope, receive, traced_send)
        except Exception:
            status = 500
            raise
        finally:
            Service.leave(scope)
            self._metrics.request_ended(endpoint_of(scope["path"]), status)
            self._log_request(scope, status, context, span)

    def _without_root(self, path: str) -> str:
        root = self._root_path
        return path[len(root) :] or "/" if root and f"{path}/".startswith(f"{root}/") else path

    def _log_request(self, scope: Scope, status: int, context: tracing.TraceContext | None, span: Any) -> None:
        logged = self._log and access.isEnabledFor(logging.INFO) and scope["path"] not in OPEN_PATHS
        if not logged and span is None:
            return
        usage = generation.usage() if (generation := scope.get("weft.generation")) is not None else {}
        tokens = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
        if span is not None and self._spans is not None:
            used = {f"gen_ai.usage.{name}": n for name, n in tokens.items()}
            self._spans.end(span, status, {"weft.request_id": scope["weft.request_id"], **used})
        if logged:
            path = scope["raw_path"].decode("ascii", "backslashreplace")[:MAX_ECHO]
            fields = {
                "request_id": scope["weft.request_id"],
                "status": status,
                "ms": round((time.perf_counter() - scope["weft.arrival"]) * 1e3, 1),
                "client": (scope.get("client") or ("-",))[0],
                **tokens,
            }
            if context is not None:
                fields |= {"trace_id": context.trace_id, "parent_id": context.parent_id}
            access.info("%s %s", scope["method"], path, extra={"fields": fields})


class Authorise:
    """Checks what browsers send, and API keys and rate limits by `scope["path"]`. It denies by default.

    Sets `scope["weft.charge"]` (charges tokens to the key), `["weft.key"]` (the key's number, 0 without keys),
    `["weft.client"]` (key or host) and `["weft.salt"]` (prefix of the request's cache salt). Paths below /admin/ need
    the admin key; without one they do not exist."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[bytes], admin_key: bytes | None, limits: RateLimits, browsers: BrowserChecks,
        *, salted: bool = False,
    ) -> None:  # fmt: skip
        """`keys`, `admin_key`: digests. `salted`: keys do not share cached prefixes."""
        self._app = app
        self._browsers = browsers
        self._keys = keys
        self._admin_keys = [admin_key] if admin_key is not None else []
        self._limits = limits
        self._salted = salted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key, error = self._key(scope)
        error = self._browsers.refusal(scope) or error
        scope["weft.key"] = key
        scope["weft.charge"] = partial(self._limits.charge, key)
        scope["weft.salt"] = f"{self._keys[key].hex()[:32]}:" if self._salted and self._keys else ""
        scope["weft.client"] = f"key {key}" if self._keys else (scope.get("client") or ("",))[0]
        limited = scope["path"] in LIMITED_PATHS and scope["method"] == "POST"
        if error is None and limited:
            error = self._limits.enter(key)
        if error is not None:
            await error.response(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> tuple[int, ApiError | None]:
        """The number of the presented key (0 without keys), and the error if it is refused."""
        known: int | None = scope.get("weft.known_key")  # set for internal requests only
        if known is not None:
            return known, None
        path = scope["path"]
        if path == "/admin" or path.startswith("/admin/") or path in ADMIN_ALIASES:
            if not self._admin_keys:
                return 0, ApiError(404, "There is nothing at this path.")
            keys: Sequence[bytes] = self._admin_keys
        elif path in OPEN_PATHS or path in (ui.PATH, docs.PATH, FAVICON) or not self._keys:
            return 0, None
        else:
            keys = self._keys
        scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
        other = _header(scope, b"x-api-key")
        found = match(key.strip(), keys) if scheme.lower() == "bearer" else None
        if found is None and other is not None:
            found = match(other.strip(), keys)
        if found is not None:
            return found, None
        what = "This server requires an API key. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        if key or other:
            what = "Incorrect API key."
        return 0, ApiError(401, what, code="invalid_api_key")


class Cors(CORSMiddleware):
    """Starlette's CORS middleware with this server's error body."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        what = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        refusal = ApiError(response.status_code, f"CORS: this {what} is not allowed.")
        out = refusal.response()
        for name, value in response.headers.items():
            if not name.startswith("content-"):
                out.headers.setdefault(name, value)
        return out


class BodyLimit:
    """Rejects bodies that are too large, by their header or while they arrive, and bodies that take too long. It reads
    and drops the rest of a body for a while, because a client that is cut off never sees the answer."""

    DISCARD_SECONDS = 5.0
    BODY_SECONDS = 60.0
    UPLOAD_SECONDS = 900.0

    def __init__(self, app: ASGIApp, bounds: Callable[[], BodyBounds], uploads: str | None = None) -> None:
        """`bounds`: the current limits, which depend on the model. `uploads`: the path of file uploads."""
        self._app, self._bounds, self._uploads = app, bounds, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope["path"] == self._uploads
        most = MAX_FILE_BYTES + FORM_BYTES if upload else self._bounds().max_bytes
        length = _header(scope, b"content-length") or ""
        too_large = ApiError(413, f"The body is larger than {most} bytes.", code="body_too_large")
        if length.isdigit() and int(length) > most:
            if _header(scope, b"expect") is None:
                await self._discard(receive)
            await too_large.response(scope)(scope, receive, send)
            return
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + (self.UPLOAD_SECONDS if upload else self.BODY_SECONDS)

        async def limited_receive() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "The body took too long to arrive.", code="slow_request") from None
            complete = not message.get("more_body")
            size += len(message.get("body", b""))
            if size > most:
                if message.get("more_body"):
                    await self._discard(receive)
                raise too_large
            return message

        await self._app(scope, limited_receive, send)

    async def _discard(self, receive: Receive) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.DISCARD_SECONDS):
                while (await receive()).get("more_body"):
                    pass


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_anthropic(scope: Scope) -> bool:
    """Whether to answer in Anthropic's format: by path, or for /v1/models by the header of Anthropic's clients."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return _header(scope, b"anthropic-version") is not None
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None
