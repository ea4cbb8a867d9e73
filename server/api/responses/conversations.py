"""`/v1/conversations`: server-side conversations to which responses add their items."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from weft.server.api.files import page
from weft.server.api.responses.body import Metadata
from weft.server.api.responses.endpoints import Limit, Order, RecordsOf
from weft.server.api.responses.items import MAX_ITEMS, Item, read_item
from weft.server.api.responses.records import Records, not_found, with_ids
from weft.server.api.routing import JsonRoute
from weft.server.bodies import Body
from weft.server.errors import bad_request

PATH = "/v1/conversations"
MAX_ADDED = 128  # items per request

router = APIRouter(route_class=JsonRoute)


Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_ADDED)]  # items as in a response's input


class ConversationBody(Body):
    items: Items = Field([])
    metadata: Metadata = Field({})


class MetadataBody(Body):
    metadata: Metadata = Field({})


class ItemsBody(Body):
    items: Items


@router.post(PATH, summary="Create a conversation")
async def create_conversation(body: ConversationBody, records: RecordsOf) -> dict[str, Any]:
    hex_id = uuid.uuid4().hex
    id = f"conv_{hex_id}"
    shown = {"id": id, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata}
    items = with_ids(_read(body.items), hex_id)

    def both() -> bool:
        store = records.store
        return store.put(id, records.owner, shown) and (not items or store.add_items(id, items, MAX_ITEMS))

    if records.store.max_bytes == 0 or not await records.store.run(both):
        raise bad_request("This server cannot store the conversation (--responses-max-mib).", code="storing_is_off")
    return shown


@router.get(f"{PATH}/{{id}}", summary="Retrieve a conversation")
async def retrieve_conversation(id: str, records: RecordsOf) -> dict[str, Any]:
    return await records.conversation(id)


@router.post(f"{PATH}/{{id}}", summary="Replace a conversation's metadata")
async def update_conversation(id: str, body: MetadataBody, records: RecordsOf) -> dict[str, Any]:
    changed = {**await records.conversation(id), "metadata": body.metadata}
    if not await records.store.run(records.store.change, id, changed):
        raise not_found("Conversation", id, "conversation")
    return changed


@router.delete(f"{PATH}/{{id}}", summary="Delete a conversation and its items")
async def delete_conversation(id: str, records: RecordsOf) -> dict[str, Any]:
    await records.conversation(id)
    await records.store.run(records.store.delete, id, records.owner)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


@router.post(f"{PATH}/{{id}}/items", summary="Add items to a conversation")
async def create_items(id: str, body: ItemsBody, records: RecordsOf) -> dict[str, Any]:
    await records.conversation(id)
    added = await _append(records, id, _read(body.items))
    return page(added, len(added), "asc", None)


@router.get(f"{PATH}/{{id}}/items", summary="List the items of a conversation")
async def list_items(
    id: str, records: RecordsOf, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> dict[str, Any]:
    return page(await records.items_of(id), limit, order, after)


@router.get(f"{PATH}/{{id}}/items/{{item}}", summary="Retrieve an item of a conversation")
async def retrieve_item(id: str, item: str, records: RecordsOf) -> Item:
    for found in await records.items_of(id):
        if found["id"] == item:
            return found
    raise not_found("Item", item, "item_id")


@router.delete(f"{PATH}/{{id}}/items/{{item}}", summary="Delete an item of a conversation")
async def delete_item(id: str, item: str, records: RecordsOf) -> dict[str, Any]:
    conversation = await records.conversation(id)
    if not await records.store.run(records.store.delete_item, id, item):
        raise not_found("Item", item, "item_id")
    return conversation


def _read(value: list[Any]) -> list[Item]:
    items = [read_item(item, f"items[{i}]") for i, item in enumerate(value)]
    if any(item["type"] == "item_reference" for item in items):
        raise bad_request("items: an item_reference cannot be added.", "items")
    return items


async def _append(records: Records, id: str, items: list[Item]) -> list[Item]:
    """Append items and return them as stored. Raises `ApiError`."""
    kept = with_ids(items, uuid.uuid4().hex)
    if not await records.append(id, kept):
        raise bad_request(f"items: a conversation has at most {MAX_ITEMS} items.", "items")
    return kept
