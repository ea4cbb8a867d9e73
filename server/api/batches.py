"""`/v1/batches`: create, retrieve, cancel, list. Only with `--files-dir`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from weft.server.api.files import FolderOf, Limit, OwnerOf, kept_seconds, no_such, out_of_room, page
from weft.server.api.routing import JsonRoute
from weft.server.batches.files import KEPT_SECONDS
from weft.server.batches.lines import Endpoint
from weft.server.batches.records import MAX_OPEN, Batch, TooMany, window_seconds
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request, clip

PATH = "/v1/batches"
MAX_METADATA = 16

router = APIRouter(route_class=JsonRoute)


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int


class BatchBody(Body):
    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field("24h", max_length=8)
    """hours or days, to 30 days: 24h, 7d. What is not answered then gets an error"""
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None


@router.post(PATH, summary="Have the requests of a file answered, behind all others")
async def create_batch(body: BatchBody, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    window = window_seconds(body.completion_window)
    if window is None:
        raise bad_request("completion_window must be like 24h or 7d, 30 days at most.", "completion_window")
    if body.metadata is not None and any(len(k) > 64 or len(v) > 512 for k, v in body.metadata.items()):
        raise bad_request("metadata: names have at most 64 characters, values 512.", "metadata")
    kept = KEPT_SECONDS
    if (after := body.output_expires_after) is not None:
        kept = kept_seconds(after.anchor, after.seconds, "output_expires_after")
    file = await asyncio.to_thread(folder.files.get, body.input_file_id, owner)
    if file is None or file.purpose != "batch":
        raise bad_request(f"There is no file '{clip(body.input_file_id)}' for batches.", "input_file_id", "not_found")
    now = int(time.time())
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
        message = f"{MAX_OPEN} batches have not ended."
        raise ApiError(429, message, code="too_many_batches", retry_after=60) from None
    except OSError as error:
        raise out_of_room(error) from None
    return batch.shown()


@router.get(PATH, summary="The batches there are")
async def batches(folder: FolderOf, owner: OwnerOf, limit: Limit = 20, after: str | None = None) -> dict[str, Any]:
    found = await asyncio.to_thread(folder.batches.of, owner)
    return page(found[::-1], limit, after)


async def _get(folder: FolderOf, id: str, owner: str) -> Batch:
    batch = await asyncio.to_thread(folder.batches.get, id, owner)
    if batch is None:
        raise no_such("batch", id)
    return batch


@router.get(PATH + "/{id}", summary="One batch")
async def retrieve_batch(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    return (await _get(folder, id, owner)).shown()


@router.post(PATH + "/{id}/cancel", summary="End a batch; what is answered stays")
async def cancel_batch(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    batch = await _get(folder, id, owner)
    if batch.ended:
        raise ApiError(409, f"Batch {id} has ended already ({batch.status}).", param="id", code="batch_ended")
    await asyncio.to_thread(folder.batches.cancel, id)
    return (await _get(folder, id, owner)).shown()
