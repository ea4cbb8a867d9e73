"""`/v1/batches`: create, retrieve, cancel, list. Needs `--files-dir`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from weft.server.api.files import FolderOf, Limit, OwnerOf, disk_error, kept_seconds, not_found_error, page
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
        message = f"{MAX_OPEN} batches are in progress; try again when some have ended."
        raise ApiError(429, message, code="too_many_batches", retry_after=60) from None
    except OSError as error:
        raise disk_error(error) from None
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
