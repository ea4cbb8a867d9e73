"""`Records`: one owner's stored responses and conversations, on top of a `Store`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.server.api.responses.items import MAX_ITEMS, Item
from weft.server.api.responses.store import Store, Stored
from weft.server.errors import ApiError, bad_request, clip

STALE_SECONDS = 60.0  # Seconds without a heartbeat after which a response counts as abandoned.
OPEN = ("queued", "in_progress")  # statuses of unfinished responses

_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})(i?)([0-9a-f]{4})")
_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}


def with_ids(items: Sequence[Item], hex_id: str) -> list[Item]:
    """Input items with ids: the client's, or one that encodes the item's position."""
    return [
        item if "id" in item else {"id": f"{_PREFIXES.get(item['type'], 'item')}_{hex_id}i{i:04x}", **item}
        for i, item in enumerate(items)
    ]


def not_found(kind: str, id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"{kind} with id '{clip(id)}' not found.", param=param, code="not_found")


class Records:
    """The responses and conversations of one owner. Every method runs as one transaction of the store."""

    def __init__(self, store: Store, owner: str) -> None:
        self.store = store
        self.owner = owner

    # -- responses. A record has the `response`, its `input`, the id of the `previous` response and whether it `streams`

    async def add(self, id: str, record: dict[str, Any]) -> bool:
        return await self.store.run(self.store.put, id, self.owner, record)

    async def finish(self, id: str, record: dict[str, Any], events: bytes) -> None:
        """Store the final state of a background response together with its last events."""

        def both() -> None:
            self.store.add_events(id, events)
            self.store.change(id, record)

        await self.store.run(both)

    async def get(self, id: str) -> dict[str, Any]:
        """A record. Raises `ApiError` 404."""
        found = await self.store.read(self.store.get, id, self.owner)
        if found is None or "response" not in found.body:
            raise not_found("Response", id)
        return _checked(found)

    async def delete(self, id: str) -> None:
        """Raises `ApiError` 404."""
        if not id.startswith("resp_") or not await self.store.run(self.store.delete, id, self.owner):
            raise not_found("Response", id)

    async def context(self, previous: str | None, conversation: str | None, new: Sequence[Item]) -> list[Item]:
        """The items of the conversation followed by `new`, with references resolved. Raises `ApiError` 400 if a
        previous response or a referenced item is missing."""

        def collect() -> list[Item]:
            earlier = self._chain(previous) if previous is not None else []
            if conversation is not None:
                self._conversation(conversation)
                earlier = self.store.items(conversation)
            items = [*earlier, *(self._resolved(item, earlier) for item in new)]
            if len(items) > MAX_ITEMS:
                raise bad_request(f"input: the conversation has more than {MAX_ITEMS} items.", "input")
            return items

        if previous is None and conversation is None and all(item["type"] != "item_reference" for item in new):
            return collect()  # it reads nothing
        return await self.store.read(collect)

    async def append(self, conversation: str, items: Sequence[Item]) -> bool:
        """Append items. Returns False if the conversation is missing or full."""
        return await self.store.run(self.store.add_items, conversation, items, MAX_ITEMS)

    def _chain(self, id: str) -> list[Item]:
        """The items through this response."""
        links: list[list[Item]] = []
        at: str | None = id
        while at is not None:
            found = self.store.get(at, self.owner)
            if found is None or "response" not in found.body:
                which = f"Previous response with id '{clip(at)}' not found."
                why = which if at == id else f"{which} '{clip(id)}' continues it."
                raise bad_request(why, "previous_response_id", "previous_response_not_found")
            record = _checked(found)
            if (status := record["response"]["status"]) in OPEN:
                raise bad_request(f"The previous response '{clip(at)}' is still {status}.", "previous_response_id")
            links.append([*record["input"], *record["response"]["output"]])
            at = record["previous"]
        return [item for link in reversed(links) for item in link]

    def _resolved(self, item: Item, earlier: Sequence[Item]) -> Item:
        if item["type"] != "item_reference":
            return item
        id = item["id"]
        for other in earlier:
            if other.get("id") == id:
                return other
        if match := _ITEM_ID.fullmatch(id):
            hex_id, is_input, number = match.groups()
            found = self.store.get(f"resp_{hex_id}", self.owner)
            items = [] if found is None else found.body["input"] if is_input else found.body["response"]["output"]
            if int(number, 16) < len(items):
                return items[int(number, 16)]
        raise bad_request(f"input: there is no item with the id '{clip(id)}'.", "input", "item_not_found")

    # -- conversations

    def _conversation(self, id: str) -> dict[str, Any]:
        found = self.store.get(id, self.owner)
        if found is None or found.body.get("object") != "conversation":
            raise not_found("Conversation", id, "conversation")
        return found.body

    async def conversation(self, id: str) -> dict[str, Any]:
        """Raises `ApiError` 404."""
        return await self.store.read(self._conversation, id)

    async def items_of(self, id: str) -> list[Item]:
        """Raises `ApiError` 404."""

        def collect() -> list[Item]:
            self._conversation(id)
            return self.store.items(id)

        return await self.store.read(collect)


def _checked(found: Stored) -> dict[str, Any]:
    """A record, marked as failed if its process abandoned it."""
    record = found.body
    response = record["response"]
    if response["status"] in OPEN and found.idle > STALE_SECONDS:
        why = {"code": "server_error", "message": "The process that worked on this response has ended."}
        response |= {"status": "failed", "error": why}
    return record
