"""`Ingress`: takes HTTP from Serve's proxies and has replicas answer it; what they answer goes on as it is.

Until a client has been given something, a request is begun again elsewhere when its replica is lost or refuses it.
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

from weft.deploy.ray.exchange import Head, Headers, Question, end_to_end
from weft.deploy.ray.prompt import prompt_keys
from weft.deploy.ray.scrape import merged
from weft.server.bodies import parse_json
from weft.server.errors import ApiError, unavailable
from weft.server.observe.exposition import CONTENT_TYPE

TRIES = 5
"""so often a request may be sent to a replica"""
PASSING = frozenset({"loading", "engine_dead", "draining"})
"""codes of a 503 that is over soon, whatever the load"""
PAUSE_SECONDS = 2.0
"""before a replica with such a 503 is asked again, where no other one is better"""
WHOLE = 32 << 20
"""bytes of an answer that is no stream up to which it is sent only when it is there"""
PROBE_SECONDS = 5.0
OF_THE_PROXY = (b"date", b"server", b"x-request-id")
"""headers that Serve's proxy adds: it names the request, or keeps the client's name, and the daemon is told"""
STATEFUL = ("/v1/files", "/v1/batches")
"""what must not be done twice"""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

logger = logging.getLogger("ray.serve")


class Broken(Exception):
    """The replica was lost after the answer had begun."""


class Begun(NamedTuple):
    """An answer of which something is there."""

    head: Head
    first: bytes
    rest: AsyncGenerator[bytes, None] | None
    """None: `first` is all of it"""


class Ingress:
    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]], max_body_bytes: int) -> None:
        """handles: of deployments, by the names that requests use; the first one answers what names none of them."""
        self._handles = dict(handles)
        self._default = next(iter(handles))
        self._deployments = {handle.deployment_name: handle for handle in handles.values()}
        self._max_body_bytes = max_body_bytes

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve: plain ASGI, so that nothing stands between a replica's bytes and the client's."""

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
            question = Question(
                scope["method"], path + (f"?{query}" if query else ""), end_to_end(list(scope["headers"])), body
            )
            if path in ("/v1/models", "/ready", "/health") and len(self._deployments) > 1:
                await self._of_all(path, question, send)
            else:
                await self._answer(*self._addressed(path, question), send)

    async def _body(self, receive: Receive) -> bytes:
        """Raises `ApiError`."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise ApiError(413, f"The body is larger than {self._max_body_bytes} bytes.", code="body_too_large")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    # -- which model, which replica

    def _addressed(self, path: str, question: Question) -> tuple[DeploymentHandle[Any], Question]:
        """The deployment that a request is for, and the request with what its router goes by."""
        if path.startswith("/v1/models/"):
            return self._handles.get(path.removeprefix("/v1/models/"), self._handles[self._default]), question
        try:
            body = parse_json(question.body) if question.body else None
        except ValueError:
            body = None  # its daemon says what is wrong with it
        if not isinstance(body, dict):
            return self._handles[self._default], question
        asked = body.get("model")
        name = asked if isinstance(asked, str) and asked in self._handles else self._default
        headers = dict(question.headers)
        tenant = headers.get(b"authorization", headers.get(b"x-api-key", b"")).decode("latin-1")
        keys, size = prompt_keys(name, body, tenant)
        return self._handles[name], Question(
            question.method, question.target, question.headers, question.body, keys, size
        )

    # -- answers

    async def _answer(self, handle: DeploymentHandle[Any], question: Question, send: Send) -> None:
        begun = await self._begin(handle, question)
        head = begun.head
        if begun.rest is None:
            await self._send_whole(head, begun.first, question, send)
            return
        async with aclosing(begun.rest) as rest:
            await send({"type": "http.response.start", "status": head.status, "headers": _kept(head)})
            if not head.is_stream:
                await send({"type": "http.response.body", "body": begun.first, "more_body": True})
                async for chunk in rest:  # `Broken` ends the connection, which shows a body that is not whole
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
            try:
                held = await self._events(begun.first, send)
                async for chunk in rest:
                    held = await self._events(held + chunk, send)
            except Broken:
                held = _lost(question.target)
            await send({"type": "http.response.body", "body": held})

    @staticmethod
    async def _events(data: bytes, send: Send) -> bytes:
        """Send whole events, so that an error can follow them; returns the rest."""
        end = data.rfind(b"\n\n") + 2
        if end > 1:
            await send({"type": "http.response.body", "body": data[:end], "more_body": True})
            return data[end:]
        return data

    async def _begin(self, handle: DeploymentHandle[Any], question: Question) -> Begun:
        """Raises `ApiError` when there is no answer to be had."""
        streaming = handle.options(stream=True, method_name="answer")
        again = not question.target.startswith(STATEFUL)
        avoid: tuple[str, ...] = ()
        for attempt in range(1, TRIES + 1):
            reply = streaming.remote(_avoiding(question, avoid))
            kept = False
            try:
                head, first, whole = await _first(reply)
                if head.status == 503 and again and attempt < TRIES:
                    if head.replica not in avoid:
                        avoid += (head.replica,)
                        continue
                    if _code(first) in PASSING:
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                kept = True
                return Begun(head, first, None if whole else _rest(reply))
            except BackPressureError:
                raise unavailable("Too many requests wait for this model.", "overloaded", 1) from None
            except DeploymentUnavailableError:
                raise unavailable("The model has no replica that starts.", "no_replica", 10) from None
            except (asyncio.CancelledError, RequestCancelledError):
                raise
            except Exception as error:  # whatever Ray makes of a lost actor, or of an exception in one
                logger.warning("a replica of %s was lost before it answered: %s", handle.deployment_name, brief(error))
                if not again:
                    break
            finally:
                if not kept:
                    reply.cancel()
        raise unavailable("The replica that had the request was lost.", "engine_dead", 1)

    # -- answers of several replicas

    async def _metrics(self) -> str:
        texts: dict[str, str] = {}
        for name, handle in self._deployments.items():
            found = await handle.broadcast("named_metrics").results_async(timeout_s=PROBE_SECONDS)
            texts.update({f"{name}#{replica}": text for replica, text in found})
        return merged(texts)

    async def _of_all(self, path: str, question: Question, send: Send) -> None:
        """Of each model; the first one that is not well speaks for all."""
        async with asyncio.timeout(PROBE_SECONDS):
            found = await asyncio.gather(*(self._begin(handle, question) for handle in self._deployments.values()))
        worst = max(found, key=lambda begun: begun.head.status)
        body = worst.first
        if path == "/v1/models" and worst.head.status == 200 and question.method == "GET":
            models = [model for begun in found for model in orjson.loads(begun.first)["data"]]
            body = orjson.dumps({"object": "list", "data": models})
        await self._send_whole(worst.head, body, question, send)

    @staticmethod
    async def _send_whole(head: Head, body: bytes, question: Question, send: Send) -> None:
        headers = _kept(head)
        if question.method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": head.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _first(reply: Any) -> tuple[Head, bytes, bool]:
    """The head, as much of the body as is needed to begin, and whether that is all."""
    head = await anext(reply)
    assert isinstance(head, Head)
    first = b""
    most = 1 if head.is_stream else WHOLE
    async for chunk in reply:
        first += chunk
        if len(first) >= most:
            return head, first, False
    return head, first, True


async def _rest(reply: Any) -> AsyncGenerator[bytes, None]:
    """Raises `Broken`. Left early, it has the replica abort."""
    ended = False
    try:
        async for chunk in reply:
            yield chunk
        ended = True
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:  # as before its first byte; the connection is broken off
        logger.warning("a replica was lost in the middle of an answer: %s", brief(error))
        raise Broken from None
    finally:
        if not ended:
            reply.cancel()


def _kept(head: Head) -> Headers:
    return [(name, value) for name, value in head.headers if name not in OF_THE_PROXY]


def _code(body: bytes) -> str:
    """Of the error that a body is."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, TypeError, LookupError):
        return ""


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error).strip() else ''}"


def _avoiding(question: Question, avoid: tuple[str, ...]) -> Question:
    q = question
    return Question(q.method, q.target, q.headers, q.body, q.keys, q.size, avoid) if avoid else q


def _lost(target: str) -> bytes:
    """The last event of a stream whose replica is gone, in the form of its endpoint. No `[DONE]` follows."""
    error = orjson.loads(unavailable("The replica that answered was lost.", "engine_dead", 1).body())["error"]
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
