"""Defines `Ingress`, which forwards HTTP requests from Serve's proxies to replicas and passes answers on unchanged.

If a replica is lost or rejects a request before the client received anything, the request restarts on another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, NamedTuple

import orjson
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from weft.deploy.ray.exchange import Head, Headers, HttpRequest, end_to_end
from weft.deploy.ray.prompt import prompt_keys
from weft.deploy.ray.scrape import merged
from weft.server.bodies import parse_json
from weft.server.errors import ApiError, unavailable
from weft.server.observe.exposition import CONTENT_TYPE

TRIES = 5
"""Maximum attempts per request."""
TRANSIENT = frozenset({"loading", "engine_dead", "draining"})
"""503 codes that soon pass, independent of load."""
PAUSE_SECONDS = 2.0
"""Seconds before retrying a replica with such a 503 if no other one is better."""
MAX_BUFFERED_BYTES = 32 << 20
"""Non-streaming answers up to this size are sent only once complete."""
PROBE_SECONDS = 5.0
PROXY_HEADERS = (b"date", b"server", b"x-request-id")
"""Headers that Serve's proxy adds. It sets the request id, or keeps the client's, and the daemon receives it."""
STATEFUL = ("/v1/files", "/v1/batches")
"""Paths that must not be retried."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

logger = logging.getLogger("ray.serve")


class ReplicaLost(Exception):
    """The replica was lost after the answer had started."""


class StartedAnswer(NamedTuple):
    """An answer with its first bytes."""

    head: Head
    first: bytes
    remainder: AsyncGenerator[bytes, None] | None
    """None: `first` is the complete body."""


class Ingress:
    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]], max_body_bytes: int) -> None:
        """handles: deployment handles by model name; the first one answers requests that name none of them."""
        self._handles = dict(handles)
        self._default = next(iter(handles))
        self._deployments = {handle.deployment_name: handle for handle in handles.values()}
        self._max_body_bytes = max_body_bytes

    async def __serve_build_asgi_app__(self) -> Any:
        """Return a plain ASGI application, so that bytes pass through unchanged. Called by Serve."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        return application

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        try:
            await self._serve(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        if path == "/metrics":
            await _reply(send, 200, CONTENT_TYPE, (await self._metrics()).encode())
        elif path.startswith("/admin/"):
            text = "One replica would answer for all: /admin/ is not served by the application."
            raise ApiError(501, text, code="not_supported")
        else:
            query = scope.get("query_string", b"").decode("latin-1")
            body = await self._body(receive)
            # The daemon compares a page's origin with it.
            forwarded = [(b"x-forwarded-host", value) for name, value in scope["headers"] if name == b"host"]
            headers = end_to_end([*forwarded, *scope["headers"]])
            request = HttpRequest(scope["method"], path + (f"?{query}" if query else ""), headers, body)
            if path in ("/v1/models", "/ready", "/health") and len(self._deployments) > 1:
                await self._of_all(path, request, send)
            else:
                await self._answer(*self._addressed(path, request), send)

    async def _body(self, receive: Receive) -> bytes:
        """Read the request body. Raises `ApiError`."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body_bytes:
                raise ApiError(413, f"The body is larger than {self._max_body_bytes} bytes.", code="body_too_large")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    # -- routing

    def _addressed(self, path: str, request: HttpRequest) -> tuple[DeploymentHandle[Any], HttpRequest]:
        """Return a request's deployment, and the request with the keys for its router."""
        if path.startswith("/v1/models/"):
            return self._handles.get(path.removeprefix("/v1/models/"), self._handles[self._default]), request
        try:
            body = parse_json(request.body) if request.body else None
        except ValueError:
            body = None  # the daemon reports the error
        if not isinstance(body, dict):
            return self._handles[self._default], request
        model = body.get("model")
        name = model if isinstance(model, str) and model in self._handles else self._default
        headers = dict(request.headers)
        tenant = headers.get(b"authorization", headers.get(b"x-api-key", b"")).decode("latin-1")
        keys, size = prompt_keys(name, body, tenant)
        return self._handles[name], HttpRequest(
            request.method, request.target, request.headers, request.body, keys, size
        )

    # -- answers

    async def _answer(self, handle: DeploymentHandle[Any], request: HttpRequest, send: Send) -> None:
        answer = await self._begin(handle, request)
        head = answer.head
        if answer.remainder is None:
            await self._send_whole(head, answer.first, request, send)
            return
        async with aclosing(answer.remainder) as remainder:
            await send({"type": "http.response.start", "status": head.status, "headers": _kept(head)})
            if not head.is_stream:
                await send({"type": "http.response.body", "body": answer.first, "more_body": True})
                async for chunk in remainder:  # `ReplicaLost` closes the connection, which marks the body as incomplete
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
            try:
                held = await self._events(answer.first, send)
                async for chunk in remainder:
                    held = await self._events(held + chunk, send)
            except ReplicaLost:
                held = _lost(request.target)
            await send({"type": "http.response.body", "body": held})

    @staticmethod
    async def _events(data: bytes, send: Send) -> bytes:
        """Send complete events, so that an error event can follow, and return the remainder."""
        end = data.rfind(b"\n\n") + 2
        if end > 1:
            await send({"type": "http.response.body", "body": data[:end], "more_body": True})
            return data[end:]
        return data

    async def _begin(self, handle: DeploymentHandle[Any], request: HttpRequest) -> StartedAnswer:
        """Start an answer, with retries. Raises `ApiError` if every attempt fails."""
        streaming = handle.options(stream=True, method_name="answer")
        retriable = not request.target.startswith(STATEFUL)
        avoid: tuple[str, ...] = ()
        for attempt in range(1, TRIES + 1):
            reply = streaming.remote(_avoiding(request, avoid))
            kept = False
            try:
                head, first, whole = await _first(reply)
                if head.status == 503 and retriable and attempt < TRIES:
                    if head.replica not in avoid:
                        avoid += (head.replica,)
                        continue
                    if _code(first) in TRANSIENT:
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                kept = True
                return StartedAnswer(head, first, None if whole else _remainder(reply))
            except BackPressureError:
                raise unavailable("Too many requests are waiting for this model.", "overloaded", 1) from None
            except DeploymentUnavailableError:
                raise unavailable("No replica of the model starts.", "no_replica", 10) from None
            except (asyncio.CancelledError, RequestCancelledError):
                raise
            except Exception as error:  # any exception that Ray raises for a lost actor or an exception in one
                logger.warning(
                    "a replica of %s was lost before it answered: %s", handle.deployment_name, one_line(error)
                )
                if not retriable:
                    break
            finally:
                if not kept:
                    reply.cancel()
        raise unavailable("The replica with this request was lost.", "engine_dead", 1)

    # -- aggregated answers

    async def _metrics(self) -> str:
        texts: dict[str, str] = {}
        for name, handle in self._deployments.items():
            # A replica that has just been killed raises. The others still have metrics.
            found = await handle.broadcast("named_metrics").results_async(
                timeout_s=PROBE_SECONDS, return_exceptions=True
            )
            answers = [answer for answer in found if not isinstance(answer, BaseException)]
            texts.update({f"{name}#{replica}": text for replica, text in answers})
        return merged(texts)

    async def _of_all(self, path: str, request: HttpRequest, send: Send) -> None:
        """Ask each model and answer with the worst status."""
        async with asyncio.timeout(PROBE_SECONDS):
            found = await asyncio.gather(*(self._begin(handle, request) for handle in self._deployments.values()))
        worst = max(found, key=lambda answer: answer.head.status)
        body = worst.first
        if path == "/v1/models" and worst.head.status == 200 and request.method == "GET":
            models = [model for answer in found for model in orjson.loads(answer.first)["data"]]
            body = orjson.dumps({"object": "list", "data": models})
        await self._send_whole(worst.head, body, request, send)

    @staticmethod
    async def _send_whole(head: Head, body: bytes, request: HttpRequest, send: Send) -> None:
        headers = _kept(head)
        if request.method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": head.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _first(reply: Any) -> tuple[Head, bytes, bool]:
    """Return the head, enough of the body to start the answer, and whether the body is complete."""
    head = await anext(reply)
    assert isinstance(head, Head)
    first = b""
    most = 1 if head.is_stream else MAX_BUFFERED_BYTES
    async for chunk in reply:
        first += chunk
        if len(first) >= most:
            return head, first, False
    return head, first, True


async def _remainder(reply: Any) -> AsyncGenerator[bytes, None]:
    """Yield the remaining body. Raises `ReplicaLost`. Closing it early aborts the request on the replica."""
    ended = False
    try:
        async for chunk in reply:
            yield chunk
        ended = True
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:  # any exception, as in `_begin`
        logger.warning("a replica was lost in the middle of an answer: %s", one_line(error))
        raise ReplicaLost from None
    finally:
        if not ended:
            reply.cancel()


def _kept(head: Head) -> Headers:
    return [(name, value) for name, value in head.headers if name not in PROXY_HEADERS]


def _code(body: bytes) -> str:
    """Return the code of an error body, or empty."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, TypeError, LookupError):
        return ""


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error).strip() else ''}"


def _avoiding(request: HttpRequest, avoid: tuple[str, ...]) -> HttpRequest:
    q = request
    return HttpRequest(q.method, q.target, q.headers, q.body, q.keys, q.size, avoid) if avoid else q


def _lost(target: str) -> bytes:
    """Return the last event of a stream from a lost replica, in the endpoint's format. No `[DONE]` follows."""
    error = orjson.loads(unavailable("The replica was lost during the answer.", "engine_dead", 1).body())["error"]
    if target.startswith("/v1/messages"):
        return _event({"type": "error", "error": {"type": "api_error", "message": error["message"]}}, "error")
    if target.startswith("/v1/responses"):
        return _event({"type": "error", "code": error["code"], "message": error["message"], "param": None}, "error")
    return _event({"error": error})


def _event(data: dict[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


async def _reply(send: Send, status: int, kind: str, body: bytes) -> None:
    headers: Headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
