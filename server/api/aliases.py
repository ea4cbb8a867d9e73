"""Aliases of other servers' paths, and the additional endpoints of vLLM, SGLang, llama.cpp and SageMaker."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Message, Receive, Scope, Send

from weft import __version__
from weft.server.api.chat_prompt import template_input
from weft.server.api.operations import health, put_to_sleep, reset_prefix_cache, wake_up
from weft.server.api.protocol import TemplatedBody
from weft.server.api.routing import STREAMED, JsonRequest, JsonRoute, ServiceOf, request_schema
from weft.server.api.service import Phase, Service
from weft.server.errors import bad_request, clip
from weft.server.observe.shared_state import OPEN, SleepState

PING = "/ping"
INVOCATIONS = "/invocations"

_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
_UNPREFIXED = frozenset(
    {"chat", "completions", "embeddings", "messages", "models", "responses", "conversations", "files", "batches"}
)
"""First path segments that clients may send without /v1."""

_BY_FIELD = {
    "messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings", "query": "/v1/rerank",
    **dict.fromkeys(("text_1", "queries", "data_1"), "/v1/score"),
}  # fmt: skip
"""The endpoint of an invocation, by the field that identifies it."""

ADMIN_ALIASES = frozenset(
    {
        "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/reset_prefix_cache",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter",
    }
)  # fmt: skip
"""vLLM's paths for operators. They need the admin key, like those below /admin/."""

router = APIRouter(route_class=JsonRoute)


def canonical(path: str) -> str:
    """This server's path for a requested path, without a trailing slash."""
    if path.endswith("/") and not path.endswith("//"):
        path = path[:-1] or "/"  # clients append paths to base URLs with and without one
    if path.startswith("/v1/v1/"):
        path = path[3:]  # some clients add /v1 to a base URL that already has it
    if path[1:].partition("/")[0] in _UNPREFIXED:
        path = f"/v1{path}"
    return _PATHS.get(path, path)


@router.head(PING, include_in_schema=False)
@router.post(PING, name="post_ping", summary="As GET")
@router.get(PING, summary="SageMaker's probe: 200 while a loaded model's engine is alive")
async def ping(service: ServiceOf) -> dict[str, str]:
    await health(service)
    asleep = (each.sleep_state is not SleepState.AWAKE and each.last_loaded is not None for each in service.models)
    if not any(asleep) and not any(each.phase is Phase.SERVING for each in service.models):
        _ = service.loaded  # raises the reason
    return {"status": "ok"}


@router.post(
    INVOCATIONS,
    summary="SageMaker's endpoint: any request for an answer, depending on the body's fields and the model",
    responses=STREAMED,
    openapi_extra=request_schema(
        "application/json", {"type": "object", "description": "a ChatBody, CompletionBody, EmbeddingBody or another"}
    ),
)
async def invocations(request: Request, service: ServiceOf) -> Response:
    request = JsonRequest(request.scope, request.receive)
    value = await request.json()
    for field in _BY_FIELD:
        if isinstance(value, dict) and value.get(field) is not None:
            return _Forwarded(_path_for(service, field, value), await request.body())
    raise bad_request(f"The body needs one of {', '.join(_BY_FIELD)}.")


def _path_for(service: Service, field: str, value: dict[str, Any]) -> str:
    """The endpoint of an invocation with this field. Raises `ApiError` for an unknown model."""
    if field not in ("messages", "input"):
        return _BY_FIELD[field]
    if value.get("task") is not None:
        return "/pooling"
    model = value.get("model")
    loaded = service.for_model(model if isinstance(model, str) else None).last_loaded
    tasks = () if loaded is None else loaded.tasks
    if not tasks or "generate" in tasks:
        return _BY_FIELD[field]
    return "/v1/embeddings" if "embed" in tasks else "/classify"


class _Forwarded(Response):
    """Forwards the body to another path and returns its answer."""

    def __init__(self, path: str, body: bytes) -> None:
        self.background = None
        self._path = path
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes | None = self._body

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        scope["path"] = self._path
        await scope["app"].router(scope, replay, send)


@router.get("/server_info", summary="Describe the model, in SGLang's format")
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


@router.get("/load", summary="Count open sequences, in vLLM's format")
async def load(service: ServiceOf) -> dict[str, int]:
    return {"server_load": int(service.shared_state.load[:, :, OPEN].sum())}


PAUSE_MODES = {"abort": 0.0, "wait": 86400.0}
"""Seconds for open requests to finish, by vLLM's name of the mode."""

Name = Annotated[str | None, Query(description="the model's name, by default the first model")]


def _patience(mode: str) -> float:
    """Raises `ApiError`."""
    if mode not in PAUSE_MODES:
        raise bad_request(f"mode: must be abort or wait, not {clip(mode)!r}.", "mode")
    return PAUSE_MODES[mode]


@router.post("/sleep", summary="Put a model to sleep, in vLLM's format (admin key)")
async def vllm_sleep(
    service: ServiceOf, level: Literal["0", "1", "2"] = "1", mode: str = "abort", model: Name = None
) -> dict[str, Any]:
    """Level 0 only pauses the model. `mode`: `abort` ends open requests, `wait` lets them finish."""
    return await put_to_sleep(service, model, int(level), _patience(mode))


@router.post("/wake_up", summary="Wake a model, in vLLM's format (admin key)")
async def vllm_wake_up(
    service: ServiceOf, tags: Annotated[list[str] | None, Query()] = None, model: Name = None
) -> dict[str, Any]:
    if tags is not None and set(tags) != {"weights", "kv_cache"}:
        raise bad_request("tags: a model wakes as a whole; leave out tags.", "tags")
    return await wake_up(service, model)


@router.get("/is_sleeping", summary="Whether a model is asleep, in vLLM's format (admin key)")
async def is_sleeping(service: ServiceOf, model: Name = None) -> dict[str, bool]:
    return {"is_sleeping": service.for_model(model).sleep_state is not SleepState.AWAKE}


@router.post("/pause", summary="Pause a model, in vLLM's format (admin key)")
async def pause(
    service: ServiceOf, mode: str = "abort", clear_cache: bool = True, model: Name = None
) -> dict[str, Any]:
    """The model keeps its memory. New requests wait until `/resume`, at most --wake-timeout. `mode`: see `/sleep`."""
    state = await put_to_sleep(service, model, 0, _patience(mode))
    if clear_cache:
        for replica in service.for_model(model).replicas:
            replica.client.reset_prefix_cache()
    return {"status": "paused", **state}


@router.post("/resume", summary="Resume a paused model, in vLLM's format (admin key)")
async def resume(service: ServiceOf, model: Name = None) -> dict[str, Any]:
    return {"status": "resumed", **await wake_up(service, model)}


@router.get("/is_paused", summary="Whether a model is paused, in vLLM's format (admin key)")
async def is_paused(service: ServiceOf, model: Name = None) -> dict[str, bool]:
    return {"is_paused": service.for_model(model).sleep_state is SleepState.PAUSED}


@router.post("/reset_prefix_cache", summary="Drop all cached prefixes, in vLLM's format (admin key)")
async def vllm_reset_prefix_cache(service: ServiceOf, reset_running_requests: bool = False) -> dict[str, str]:
    """In all tiers, with or without vLLM's `reset_external`."""
    if reset_running_requests:
        raise bad_request("reset_running_requests is not supported; use /pause.", "reset_running_requests")
    return await reset_prefix_cache(service)


@router.get("/props", summary="Describe the model, in llama.cpp's format")
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


@router.post("/apply-template", summary="Render a conversation as text, in llama.cpp's format")
async def apply_template(body: TemplatedBody, request: Request, service: ServiceOf) -> dict[str, str]:
    service = await service.enter(body.model, request.scope, body.check_template)
    return {"prompt": await service.loaded.text.render(*template_input(body, body.messages, body.tools, service))}
