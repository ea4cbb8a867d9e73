"""Endpoints that load and unload LoRA adapters, as vLLM and SGLang have them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from weft.server.api.adapter_names import MAX_NAME, NAME
from weft.server.api.protocol import ErrorBody, ErrorDetail
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.bodies import Body
from weft.server.errors import bad_request, clip

router = APIRouter(route_class=JsonRoute)


class LoadBody(Body):
    """vLLM's body, with the model's name that its sidecars add, and SGLang's `pinned`."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    base_model_name: str | None = None
    pinned: bool = False


class UnloadBody(Body):
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)


class AdapterError(BaseModel, extra="forbid"):
    """An error with vLLM's fields at the top level, which its sidecars read, and OpenAI's."""

    object: Literal["error"]
    message: str
    type: str
    code: int
    error: ErrorDetail


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    "4XX": {"model": ErrorBody | AdapterError},
}


def _refused(status: int, kind: str, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": kind}
    return JSONResponse({"object": "error", "message": message, "type": kind, "code": status, "error": error}, status)


@router.post(
    "/v1/load_lora_adapter", summary="Load a LoRA adapter from a directory (admin key)",
    responses=ANSWERS,
)  # fmt: skip
@router.post("/load_lora_adapter", include_in_schema=False)
async def load_lora_adapter(body: LoadBody, service: ServiceOf) -> Response:
    chosen = service.for_model(body.base_model_name)
    name, path = body.lora_name, Path(body.lora_path)
    if body.pinned:
        raise bad_request("pinned is not supported: adapters in use are never evicted.", "pinned")
    if NAME.fullmatch(name) is None:
        raise bad_request("lora_name: use letters, digits, '.', '_', '-' and '/'.", "lora_name")
    if any(name in each.config.model_names for each in service.models):
        return _refused(400, "InvalidUserInput", f"The name '{name}' is that of a model.")
    if chosen.adapters.find(name) is not None and not body.load_inplace:
        message = f"The lora adapter '{name}' has already been loaded; set load_inplace to replace it."
        return _refused(400, "InvalidUserInput", message)
    path = path if path.is_absolute() or chosen.adapters.folder is None else chosen.adapters.folder / path
    why = chosen.adapters.refusal(path)
    if not why and not await chosen.offload(partial(os.path.isdir, path)):
        return _refused(404, "NotFoundError", f"No adapter '{name}' found: there is no directory {clip(str(path))}.")
    why = why or await chosen.adapters.load(name, str(path.absolute()))
    if why:
        return _refused(400, "InvalidUserInput", f"The lora adapter '{name}' cannot be loaded: {why}.")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter", summary="Unload a LoRA adapter; open requests finish (admin key)",
    responses=ANSWERS,
)  # fmt: skip
@router.post("/unload_lora_adapter", include_in_schema=False)
async def unload_lora_adapter(body: UnloadBody, service: ServiceOf) -> Response:
    name = body.lora_name
    chosen = next((each for each in service.models if each.adapters.find(name) is not None), None)
    if chosen is None:
        return _refused(404, "NotFoundError", f"The lora adapter '{clip(name)}' cannot be found.")
    if why := await chosen.adapters.unload(name):
        return _refused(400, "InvalidUserInput", f"The lora adapter '{name}' cannot be unloaded: {why}.")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
