"""Other servers' names for what is here, and what clients of vLLM, SGLang, llama.cpp and SageMaker ask beside it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Message, Receive, Scope, Send

from weft import __version__
from weft.server.api.operations import health
from weft.server.api.protocol import TemplatedBody
from weft.server.api.routing import STREAMED, JsonRequest, JsonRoute, ServiceOf
from weft.server.api.service import Phase
from weft.server.api.turn import conversation
from weft.server.errors import bad_request
from weft.server.observe.board import OPEN, Rest

PING = "/ping"
INVOCATIONS = "/invocations"

_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
_UNPREFIXED = frozenset(
    {"chat", "completions", "embeddings", "messages", "models", "responses", "conversations", "files", "batches"}
)
"""first parts of paths that are below /v1 here"""

_BY_FIELD = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""what an invocation is, by a field that its body needs"""

router = APIRouter(route_class=JsonRoute)


def canonical(path: str) -> str:
    """The path under which this server knows what is asked for, with no slash at its end."""
    if path.endswith("/") and not path.endswith("//"):
        path = path[:-1] or "/"  # base URLs are written with and without it
    if path.startswith("/v1/v1/"):
        path = path[3:]  # and with the /v1 that some clients add
    if path[1:].partition("/")[0] in _UNPREFIXED:
        path = f"/v1{path}"
    return _PATHS.get(path, path)


@router.head(PING, include_in_schema=False)
@router.get(PING, summary="SageMaker's probe: 200 once the model is loaded, as long as the engine lives")
async def ping(service: ServiceOf) -> dict[str, str]:
    await health(service)
    asleep = (each.rest is not Rest.AWAKE and each.ever is not None for each in service.models)
    if not any(asleep) and not any(each.phase is Phase.SERVING for each in service.models):
        _ = service.loaded  # says why not
    return {"status": "ok"}


@router.post(
    INVOCATIONS,
    summary="SageMaker's one path: a chat or a completion, by the body's fields",
    responses=STREAMED,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"type": "object", "description": "a ChatBody or a CompletionBody"}}
            },
        }
    },
)
async def invocations(request: Request) -> Response:
    request = JsonRequest(request.scope, request.receive)
    value = await request.json()
    for field, path in _BY_FIELD.items():
        if isinstance(value, dict) and value.get(field) is not None:
            return _Elsewhere(path, await request.body())
    raise bad_request(f"The body needs one of {', '.join(_BY_FIELD)}.")


class _Elsewhere(Response):
    """The answer of another path to the same body."""

    def __init__(self, path: str, body: bytes) -> None:
        self.background = None
        self._path = path
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes | None = self._body

        async def again() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        scope["path"] = self._path
        await scope["app"].router(scope, again, send)


@router.get("/server_info", summary="What is served, in SGLang's words")
async def server_info(service: ServiceOf) -> dict[str, Any]:
    ready = service.known.ready
    return {
        "version": __version__,
        "model_path": service.config.model_names[0],
        "served_model_name": service.config.model_names[0],
        "context_length": ready.max_model_len,
        "max_total_num_tokens": ready.num_pages * ready.page_size,
        "max_running_requests": ready.max_num_seqs,
        "dtype": ready.dtype,
        "device": ready.device,
        "page_size": ready.page_size,
        "status": "ready",
    }


@router.get("/load", summary="Sequences open, in vLLM's words")
async def load(service: ServiceOf) -> dict[str, int]:
    return {"server_load": int(service.board.load[:, :, OPEN].sum())}


@router.get("/props", summary="What is served, in llama.cpp's words")
async def props(service: ServiceOf) -> dict[str, Any]:
    loaded = service.known
    return {
        "default_generation_settings": {"n_ctx": loaded.ready.max_model_len},
        "total_slots": loaded.ready.max_num_seqs,
        "model_path": service.config.model_names[0],
        "chat_template": loaded.tokenizer.chat_template or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"weft {__version__}",
    }


@router.post("/apply-template", summary="The text that a conversation becomes, as llama.cpp has it")
async def apply_template(body: TemplatedBody, request: Request, service: ServiceOf) -> dict[str, str]:
    service = service.of(body.model)
    body.check_template()
    await service.enter(body.model, request.scope)
    return {"prompt": await service.loaded.text.render(*conversation(body, body.messages, body.tools, service))}
