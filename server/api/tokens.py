"""Endpoints that tokenize and generate nothing: the render endpoints, `/tokenize`, `/detokenize`, `/tokenizer_info`.

Routers use the render endpoints to find out which cached pages a request would hit.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from weft.server.api.chat_prompt import prompt_ids, template_input
from weft.server.api.completions import prompts_of
from weft.server.api.llama_cpp import tokenize_content
from weft.server.api.media.prompt import encode_with_images
from weft.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.server.api.routing import JsonRoute, ServiceOf

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions/render", summary="Return the prompt token ids of a completion request")
async def render_completions(body: CompletionBody, request: Request, service: ServiceOf) -> list[dict[str, Any]]:
    service = await service.enter(body.model, request.scope, body.check)
    model = service.name(body.model)
    return [{"token_ids": p.token_ids, "model": model} for p in await prompts_of(service, body)]


@router.post("/v1/chat/completions/render", summary="Return the prompt token ids of a chat request")
async def render_chat(body: ChatBody, request: Request, service: ServiceOf) -> dict[str, Any]:
    ids = await prompt_ids(body, request.scope, service)
    return {"token_ids": ids, "features": None, "model": service.name(body.model)}


DETOKENIZED_CONTEXTS = 16  # token ids per request, in multiples of the context length


@router.post("/tokenize", summary="Tokenize a text or a conversation")
async def tokenize(body: TokenizeBody, request: Request, service: ServiceOf) -> dict[str, Any]:
    service = await service.enter(body.model, request.scope, body.check, task=None)
    if body.content is not None:
        return await tokenize_content(body, service)
    loaded, prompts = service.loaded, body.prompt
    if body.messages is not None:
        tools = [] if body.tool_choice == "none" else body.tools
        messages = template_input(body, body.messages, tools, service)
        special = bool(body.add_special_tokens)
        prompt, _ = await encode_with_images(loaded, messages, request.scope, add_special_tokens=special)
        all_ids = [prompt.ids]
    else:
        special, texts = body.add_special_tokens is not False, prompts if isinstance(prompts, list) else [prompts or ""]
        all_ids = await loaded.text.encode(texts, add_special_tokens=special, param="prompt")
    named = body.return_token_strs
    names = [[loaded.tokenizer.token_name(token_id) for token_id in ids] if named else None for ids in all_ids]
    fields: dict[str, Any] = {
        "count": [len(ids) for ids in all_ids],
        "tokens": all_ids,
        "token_strs": names if named else None,
    }
    if not isinstance(prompts, list):  # several prompts have a list in each field
        fields = {name: None if values is None else values[0] for name, values in fields.items()}
    return {"max_model_len": loaded.ready.max_model_len, **fields}


@router.post("/detokenize", summary="Convert token ids to text")
async def detokenize(body: DetokenizeBody, request: Request, service: ServiceOf) -> dict[str, str]:
    service = await service.enter(body.model, request.scope, task=None)
    loaded = service.loaded
    loaded.text.check_ids(body.tokens, "tokens", at_most=DETOKENIZED_CONTEXTS * loaded.ready.max_model_len)
    text = await service.offload(lambda: loaded.tokenizer.decode(body.tokens))
    named = "model" in body.model_fields_set
    return {"prompt": text} if named else {"prompt": text, "content": text}  # llama.cpp's clients name no model


@router.get("/tokenizer_info", summary="Return special tokens and the chat template")
async def tokenizer_info(service: ServiceOf) -> dict[str, Any]:
    loaded = service.known
    return {**loaded.tokenizer.info(), "max_model_len": loaded.ready.max_model_len}
