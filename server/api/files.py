"""`/v1/files`: upload, list, retrieve, download, delete. Needs `--files-dir`."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import FileResponse

from weft.server.api.media.prompt import owner_of_key
from weft.server.api.routing import request_schema
from weft.server.api.transfer import Download, discard, receive
from weft.server.batches.files import DAY, KEPT_SECONDS, Files, StoredFile, StoreFull
from weft.server.batches.records import Folder
from weft.server.errors import ApiError, bad_request, clip

PATH = "/v1/files"
KEPT = (3600, KEPT_SECONDS)  # bounds of `expires_after`, in seconds

IMAGE_PURPOSES = ("vision", "user_data")
PURPOSES = ("batch", *IMAGE_PURPOSES)

router = APIRouter()


async def folder_of(request: Request) -> AsyncIterator[Folder]:
    """The folder of files and batches. If the endpoint fails because of the disk, the client gets the cause."""
    try:
        yield request.app.state.folder
    except OSError as error:
        request.app.state.service.metrics.storage.failed("files", error.strerror or str(error))
        raise disk_error(error) from None


async def owner_of(request: Request) -> str:
    """The owner of a request's files and batches: a prefix of the key's digest, or empty without keys."""
    return owner_of_key(request.app.state.service, request.scope["weft.key"])


FolderOf = Annotated[Folder, Depends(folder_of)]
OwnerOf = Annotated[str, Depends(owner_of)]
Limit = Annotated[int, Query(ge=1, le=10_000)]


def page(items: Sequence[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """One page of a list of objects, which are in ascending order. Raises `ApiError`."""
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad_request(f"after: there is no object with the id {clip(after)!r}.", "after")
        items = items[ids.index(after) + 1 :]
    data = list(items[:limit])
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > limit}


def not_found_error(what: str, id: str) -> ApiError:
    return ApiError(404, f"There is no {what} '{clip(id)}'.", param="id", code="not_found")


def disk_error(error: OSError) -> ApiError:
    """The client's error when the disk fails."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "The disk is full.", code="files_full")
    return ApiError(500, "The files folder cannot be used.", code="files_unusable")


def kept_seconds(anchor: str | None, seconds: object, param: str) -> int:
    """The seconds of OpenAI's `expires_after`. Raises `ApiError`."""
    if anchor is None and seconds is None:
        return KEPT_SECONDS
    if anchor != "created_at":
        raise bad_request(f"{param}: the anchor must be created_at.", param)
    number = int(str(seconds)) if re.fullmatch(r"\d{1,9}", str(seconds)) else 0
    if not KEPT[0] <= number <= KEPT[1]:
        raise bad_request(f"{param}: seconds must be from {KEPT[0]} to {KEPT[1]} ({KEPT[1] // DAY} days).", param)
    return number


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": [*PURPOSES]},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": KEPT[0], "maximum": KEPT[1]},
    },
}


@router.post(
    PATH, summary="Upload a batch input file or an image", openapi_extra=request_schema("multipart/form-data", _FORM)
)
async def create_file(request: Request, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    chunks = request.stream()
    try:
        file = await _create(request.headers.get("content-type", ""), chunks, folder.files, owner)
        request.app.state.service.metrics.storage.worked("files")
        return file.to_json()
    except StoreFull as error:
        raise ApiError(413, str(error), param="file", code="files_full") from None
    finally:
        await discard(chunks)


async def _create(content_type: str, chunks: AsyncIterator[bytes], files: Files, owner: str) -> StoredFile:
    upload = await asyncio.to_thread(files.begin)
    try:
        form = await receive(content_type, chunks, upload)
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise bad_request(f"purpose must be one of {', '.join(PURPOSES)}, not {clip(purpose)}.", "purpose")
        after = [form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")]
        about = {"filename": form.filename, "purpose": purpose, "owner": owner}
        kept = kept_seconds(after[0], after[1], "expires_after")
        return await asyncio.to_thread(files.take, upload.path, **about, kept=kept)
    finally:
        await asyncio.to_thread(upload.close)


@router.get(PATH, summary="List files")
async def files(
    folder: FolderOf,
    owner: OwnerOf,
    limit: Limit = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    found = await asyncio.to_thread(folder.files.owned_by, owner)
    return page([file.to_json() for file in found if purpose in (None, file.purpose)], limit, order, after)


async def _get(folder: Folder, id: str, owner: str) -> StoredFile:
    if (file := await asyncio.to_thread(folder.files.get, id, owner)) is None:
        raise not_found_error("file", id)
    return file


@router.get(PATH + "/{id}", summary="Retrieve a file's metadata")
async def retrieve_file(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    return (await _get(folder, id, owner)).to_json()


@router.get(PATH + "/{id}/content", summary="Download a file", response_class=FileResponse)
async def file_content(id: str, folder: FolderOf, owner: OwnerOf) -> Download:
    file = await _get(folder, id, owner)
    path = folder.files.content(id)
    if not path.exists():
        raise not_found_error("file", id)
    kind = "application/octet-stream" if file.purpose in IMAGE_PURPOSES else "application/jsonl"
    return Download(path, kind, file.filename)


@router.delete(PATH + "/{id}", summary="Delete a file")
async def delete_file(id: str, folder: FolderOf, owner: OwnerOf) -> dict[str, Any]:
    await _get(folder, id, owner)
    users = [b.id for b in await asyncio.to_thread(folder.batches.open) if b.input_file_id == id]
    if users:
        raise ApiError(409, f"Batch {users[0]} uses this file; cancel the batch first.", param="id", code="file_in_use")
    await asyncio.to_thread(folder.files.remove, id)
    return {"id": id, "object": "file", "deleted": True}
