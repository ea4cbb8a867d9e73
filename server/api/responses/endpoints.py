"""`/v1/responses`: create, retrieve, follow, cancel and delete responses; list and count their input."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import StreamingResponse

from weft.server.api.answer import Answer
from weft.server.api.chat_prompt import prompt_ids
from weft.server.api.files import OwnerOf, page
from weft.server.api.media.prompt import without_place
from weft.server.api.responses.background import Background, Run, follow
from weft.server.api.responses.body import OfferedTools, ResponseBody
from weft.server.api.responses.dialect import ResponseDialect
from weft.server.api.responses.items import Item, read_input
from weft.server.api.responses.records import OPEN, Records, with_ids
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.api.turn import Turn, begin_turn
from weft.server.errors import ApiError, bad_request, renamed

PATH = "/v1/responses"
NOT_STORED = "weft.not_stored"  # entry of a scope: why not everything is stored, as the code of an error
CANCEL_SECONDS = 5.0  # seconds to wait for a cancelled response to end

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Annotated[str, Query(pattern="^(asc|desc)$")]  # the order of a list of items

router = APIRouter(route_class=JsonRoute)


async def records_of(request: Request, owner: OwnerOf) -> Records:
    return Records(request.app.state.responses, owner)


RecordsOf = Annotated[Records, Depends(records_of)]


@router.post(PATH, summary="Answer a conversation, as items", responses=STREAMED)
async def create_response(body: ResponseBody, request: Request, service: ServiceOf, records: RecordsOf) -> Response:
    service.for_model(body.model)
    body.check()
    background: Background = request.app.state.background
    await _settle_storing(body, records, request.scope)
    hex_id = uuid.uuid4().hex
    new = with_ids(read_input(body.input), hex_id)
    context = await records.context(body.previous_response_id, body.conversation, new)
    new = context[len(context) - len(new) :]
    tools = OfferedTools.of(body.tools)
    with background.reserved() if body.background else nullcontext():
        turn = await _begin_turn(body, context, tools, request, service)
        record: dict[str, Any] = {"input": new, "previous": body.previous_response_id, "streams": body.stream}

        async def keep(response: dict[str, Any]) -> None:
            """Store it. If that fails, the client still gets the answer, which then says so."""
            record["response"] = response
            failed, unappended = None, None
            if body.conversation is not None and response["status"] in ("completed", "incomplete"):
                items = [*new, *response["output"]]
                unappended = await _why_not(records.append(body.conversation, items), "conversation_full")
                if unappended is not None:
                    response["conversation"] = None
            if body.store and not body.background:
                failed = await _why_not(records.add(response["id"], record), "store_full")
                if failed is not None:
                    response["store"] = False
            if failed or unappended:
                request.scope[NOT_STORED] = failed or unappended

        dialect = ResponseDialect(turn, body, tools, hex_id, keep)
        answer = Answer(turn.generation, dialect)
        if not body.background:
            return answer
        record["response"] = dialect.response
        await background.begin(Run(answer, dialect, records, record), request.scope)
        if body.stream:
            return _followed(records, dialect.response["id"], -1)
        return _json({**dialect.response, "status": "queued"})


@router.post(f"{PATH}/input_tokens", summary="Count the input tokens of a response")
async def count_input_tokens(
    body: ResponseBody, request: Request, service: ServiceOf, records: RecordsOf
) -> dict[str, Any]:
    service.for_model(body.model)
    body.check()
    own = read_input(body.input)
    context = await records.context(body.previous_response_id, body.conversation, own)
    ids = await prompt_ids(body.as_chat(context, OfferedTools.of(body.tools)), request.scope, service)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get(f"{PATH}/{{id}}", summary="Retrieve a stored response or its events", responses=STREAMED)
async def retrieve_response(
    id: str, records: RecordsOf, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
) -> Response:
    record = await records.get(id)
    if not stream:
        return _json(record["response"])
    if not (record["streams"] and record["response"]["background"]):
        raise bad_request("Only responses created with background and stream can be streamed again.", "stream")
    return _followed(records, id, starting_after)


@router.delete(f"{PATH}/{{id}}", summary="Delete a stored response")
async def delete_response(id: str, records: RecordsOf) -> dict[str, Any]:
    await records.delete(id)
    return {"id": id, "object": "response", "deleted": True}


@router.post(f"{PATH}/{{id}}/cancel", summary="Cancel a background response")
async def cancel_response(id: str, records: RecordsOf) -> Response:
    record = await records.get(id)
    if not record["response"]["background"]:
        raise bad_request("Only responses created with background: true can be cancelled.", "id")
    if record["response"]["status"] in OPEN:
        await records.store.run(records.store.cancel, id, records.owner)
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                async for _ in follow(records, id, -1):
                    pass
        record = await records.get(id)
    return _json(record["response"])


@router.get(f"{PATH}/{{id}}/input_items", summary="List the input items of a stored response")
async def list_input_items(
    id: str, records: RecordsOf, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> dict[str, Any]:
    record = await records.get(id)
    items = await records.context(record["previous"], None, record["input"])
    return page(items, limit, order, after)


async def _why_not(storing: Awaitable[bool], refused: str) -> str | None:
    """Why something was not stored, as the code of an error. `refused`: the code if the store does not take it."""
    try:
        return None if await storing else refused
    except ApiError as error:
        return error.code


async def _settle_storing(body: ResponseBody, records: Records, scope: MutableMapping[str, Any]) -> None:
    """Switch storing off if the server stores nothing, or if its disk fails. Raises `ApiError` if the request depends
    on it."""
    if records.store.max_bytes == 0:
        if body.background or body.conversation is not None or body.previous_response_id is not None:
            what = "This server stores no responses (--responses-max-mib 0); send the whole conversation."
            raise bad_request(what, "store", "storing_is_off")
        if body.store and "store" in body.model_fields_set:
            scope[NOT_STORED] = "storing_is_off"
        body.store = False
    elif (body.store or body.conversation is not None) and (refusal := await records.store.refusal()) is not None:
        if body.background or body.conversation is not None:
            raise refusal
        body.store, scope[NOT_STORED] = False, refusal.code


async def _begin_turn(
    body: ResponseBody, items: Sequence[Item], tools: OfferedTools, request: Request, service: Service
) -> Turn:
    """Begin the turn. Raises `ApiError` with the field names of this endpoint."""
    chat = body.as_chat(items, tools)
    try:
        if body.truncation == "disabled":
            return await begin_turn(chat, request, service)
        return await _begin_truncated(body, items, tools, request, service)
    except ApiError as error:
        error = without_place(error)
        if (param := error.param or "").startswith("tools["):
            named = [text.replace(".function.parameters", ".parameters") for text in (error.message, param)]
            raise ApiError(error.status, named[0], param=named[1], code=error.code) from None
        for theirs, ours in (("messages", "input"), ("response_format", "text.format")):
            if theirs not in body.model_fields_set:
                error = renamed(error, theirs, ours)
        raise error from None


async def _begin_truncated(
    body: ResponseBody, items: Sequence[Item], tools: OfferedTools, request: Request, service: Service
) -> Turn:
    """Begin the turn, dropping the oldest items if the conversation is too long.

    It keeps the leading system and developer items and cuts before a user item, found by binary search. Raises
    `ApiError` if even the last user item does not fit.
    """
    head = 0
    while head < len(items) and items[head].get("role") in ("system", "developer"):
        head += 1
    cuts = [head, *(i for i in range(head + 1, len(items)) if items[i].get("role") == "user")]
    low, high, found = 0, len(cuts) - 1, None
    at = 0
    while low <= high:
        chat = body.as_chat([*items[:head], *items[cuts[at] :]], tools)
        try:
            found = await begin_turn(chat, request, service)
            high = at - 1
        except ApiError as error:
            if error.code != "context_length_exceeded" or at == len(cuts) - 1:
                raise
            low = at + 1
        at = (low + high) // 2
    assert found is not None
    return found


def _followed(records: Records, id: str, after: int) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(follow(records, id, after), media_type="text/event-stream", headers=headers)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
