"""`POST /v1/completions/render`, `/v1/chat/completions/render`: the token ids that a request becomes, and no more.

Routers ask, to know which pages a request would find.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from weft.server.api.completions import prompts_of
from weft.server.api.protocol import ChatBody, CompletionBody
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.turn import offered, prompt_ids

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions/render", summary="Token ids of a prompt, as the same request without /render has them")
async def render_completions(body: CompletionBody, request: Request, service: ServiceOf) -> list[dict[str, Any]]:
    service = service.of(body.model)
    body.check()
    await service.enter(body.model, request.scope)
    model = service.name(body.model)
    return [{"token_ids": p.token_ids, "model": model} for p in await prompts_of(service, body)]


@router.post("/v1/chat/completions/render", summary="Token ids of a conversation, as the same request without /render")
async def render_chat(body: ChatBody, request: Request, service: ServiceOf) -> dict[str, Any]:
    service = service.of(body.model)
    body.check()
    await service.enter(body.model, request.scope)
    model = service.name(body.model)
    return {"token_ids": await prompt_ids(body, offered(body), service), "features": None, "model": model}
