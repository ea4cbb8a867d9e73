"""`/v1/batches`: create, retrieve, cancel, list. Needs `--files-dir`.

`make_batch_runner`: processes batches with internal requests to this process's endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.types import ASGIApp, Message

from weft.server.api.files import FolderOf, Limit, OwnerOf, kept_seconds, not_found_error, page
from weft.server.api.routing import JsonRoute
from weft.server.api.service import Phase, Service
from weft.server.batches.files import KEPT_SECONDS
from weft.server.batches.lines import BatchLine, Endpoint
from weft.server.batches.records import MAX_OPEN, Batch, Folder, TooMany, window_seconds
from weft.server.batches.runner import OwnerGone, Reply, Runner
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request, clip
from weft.server.keys import BATCH_PRIORITY, GAP
from weft.server.observe.shared_state import OPEN, PREFILL

PATH = "/v1/batches"
MAX_METADATA = 16
SHARE = 7 / 8  # fraction of the engines' slots that batches may use; the rest stays free for clients

router = APIRouter(route_class=JsonRoute)
logger = logging.getLogger("weft")


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int


class BatchBody(Body):
    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field("24h", max_length=8)
    """Hours or days, at most 30 days: 24h, 7d. Requests unanswered by then get an error."""
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None


@router.post(PATH, summary="Process the requests of a file at low priority")
async def create_batch(body: BatchBody, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    window = window_seconds(body.completion_window)
    if window is None:
        raise bad_request("completion_window must be a time such as 24h or 7d, at most 30 days.", "completion_window")
    if body.metadata is not None and any(len(k) > 64 or len(v) > 512 for k, v in body.metadata.items()):
        raise bad_request("metadata: keys must have at most 64 characters, values at most 512.", "metadata")
    after = body.output_expires_after
    kept = KEPT_SECONDS if after is None else kept_seconds(after.anchor, after.seconds, "output_expires_after")
    file = await asyncio.to_thread(folder.files.get, body.input_file_id, owner)
    if file is None or file.purpose != "batch":
        raise bad_request(f"There is no batch input file '{clip(body.input_file_id)}'.", "input_file_id", "not_found")
    now = int(folder.batches.clock.latest())
    batch = Batch(
        id=folder.batches.new_id(),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window,
        owner=owner,
        kept=kept,
        metadata=body.metadata,
    )
    try:
        await asyncio.to_thread(folder.batches.create, batch)
    except TooMany:
        message = f"{MAX_OPEN} batches are in progress; try again when some have ended."
        raise ApiError(429, message, code="too_many_batches", retry_after=60) from None
    return batch.to_json()


@router.get(PATH, summary="List batches")
async def batches(folder: FolderOf, owner: OwnerOf, limit: Limit = 20, after: str | None = None) -> dict[str, Any]:
    found = await asyncio.to_thread(folder.batches.owned_by, owner)
    return page([batch.to_json() for batch in found], limit, "desc", after)


async def _get(folder: FolderOf, id: str, owner: str) -> Batch:
    if (batch := await asyncio.to_thread(folder.batches.get, id, owner)) is None:
        raise not_found_error("batch", id)
    return batch


@router.get(PATH + "/{id}", summary="Retrieve a batch")
async def retrieve_batch(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    return (await _get(folder, id, owner)).to_json()


@router.post(PATH + "/{id}/cancel", summary="Cancel a batch; finished answers are kept")
async def cancel_batch(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    batch = await _get(folder, id, owner)
    if batch.ended:
        raise ApiError(409, f"Batch {id} has already ended ({batch.status}).", param="id", code="batch_ended")
    await asyncio.to_thread(folder.batches.cancel, id)
    return (await _get(folder, id, owner)).to_json()


def make_batch_runner(app: ASGIApp, service: Service, folder: Folder) -> Runner:
    """`app`: the application with all middleware."""

    async def send(line: BatchLine, owner: str) -> Reply:
        priority = line.body.get("priority")
        own = priority if type(priority) is int else BATCH_PRIORITY
        body = {**line.body, "priority": max(BATCH_PRIORITY, own)}
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

    def failed(why: str) -> None:
        service.metrics.storage.failed("files", why)

    return Runner(folder.files, folder.batches, send, headroom, lambda: service.closing, failed)


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
