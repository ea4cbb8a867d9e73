"""`make_batch_runner`: processes batches with internal requests to this process's endpoints."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from weft.server.api.service import Phase, Service
from weft.server.batches.lines import BatchLine
from weft.server.batches.records import Folder
from weft.server.batches.runner import OwnerGone, Reply, Runner
from weft.server.keys import GAP
from weft.server.observe.shared_state import OPEN, PREFILL

logger = logging.getLogger("weft")

PRIORITY = 1000  # the best priority of batch requests; clients' requests default to 0
SHARE = 7 / 8
"""Fraction of the engines' slots that batches may use; the rest stays free for clients."""


def make_batch_runner(app: ASGIApp, service: Service, folder: Folder) -> Runner:
    """`app`: the application with all middleware."""

    async def send(line: BatchLine, owner: str) -> Reply:
        priority = line.body.get("priority")
        body = {**line.body, "priority": max(PRIORITY, priority) if type(priority) is int else PRIORITY}
        return await _call(app, line.url, orjson.dumps(body), _key(service, owner))

    def headroom(own: int) -> int:
        loaded = [each.loaded for each in service.models if each.phase is Phase.SERVING]
        if not loaded:
            return 0
        num_open, prefill_tokens = service.shared_state.load[:, :, [OPEN, PREFILL]].sum(axis=(0, 1)).tolist()
        # Batches add nothing to a queue, and leave half of the prompt token limit to clients.
        if any(each.replicas.waiting for each in loaded) or 2 * prefill_tokens > service.config.max_queued_tokens:
            return 0
        return max(1, int(SHARE * sum(each.ready.max_num_seqs for each in loaded))) - max(num_open, own)

    return Runner(folder.files, folder.batches, send, headroom, lambda: service.closing)


def _key(service: Service, owner: str) -> int:
    """The number of the key that created a batch. Raises `OwnerGone`."""
    if not owner and not service.keys:
        return 0
    for number, key in enumerate(service.keys):
        if key != GAP and key.hex()[:32] == owner:
            return number
    raise OwnerGone


async def _call(app: ASGIApp, path: str, body: bytes, key: int) -> Reply:
    name = f"batch-{uuid.uuid4().hex}"
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", name.encode()),
        ],
        "client": None,
        "server": None,
        "weft.known_key": key,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()
    status, headers, parts = 500, {}, []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # a bug: it was answered with a 500 and raised for the log
        logger.exception("batch request %s failed", name)
    retry_after = None
    with suppress(KeyError, ValueError):
        retry_after = float(headers[b"retry-after"])
    answer = b"".join(parts)
    return Reply(status, answer, name, retry_after, engine_died=status == 503 and b'"engine_dead"' in answer)
