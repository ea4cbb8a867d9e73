"""`POST /v1/completions/render` and `/v1/chat/completions/render`: a request's token ids, without generating.

Routers use them to find out which cached pages a request would hit.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from weft.server.api.chat_prompt import prompt_ids
from weft.server.api.completions import prompts_of
from weft.server.api.protocol import ChatBody, CompletionBody
from weft.server.api.routing import JsonRoute, ServiceOf

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions/render", summary="Return the prompt token ids of a completion request")
async def render_completions(body: CompletionBody, request: Request, service: ServiceOf) -> list[dict[str, Any]]:
    service = service.for_model(body.model)
    body.check()
    await service.enter(body.model, request.scope)
    model = service.name(body.model)
    return [{"token_ids": p.token_ids, "model": model} for p in await prompts_of(service, body)]


@router.post("/v1/chat/completions/render", summary="Return the prompt token ids of a chat request")
async def render_chat(body: ChatBody, request: Request, service: ServiceOf) -> dict[str, Any]:
    ids = await prompt_ids(body, request.scope, service)
    return {"token_ids": ids, "features": None, "model": service.name(body.model)}
