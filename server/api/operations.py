"""Endpoints for operators, probes and routers: models, health, readiness, metrics, version, administration."""

from __future__ import annotations

import asyncio
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse

from weft import __version__
from weft.engine.errors import EngineDead
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.service import Phase, Service
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request, clip
from weft.server.observe.exposition import CONTENT_TYPE
from weft.server.observe.shared_state import ENTERED, SleepState

PROFILE_PATIENCE = 120.0
"""Seconds to wait beyond the requested time: the profiler starts slowly, and large traces take time to write."""
PROFILE_POLL = 0.1
FAVICON = "/favicon.ico"

router = APIRouter(route_class=JsonRoute)


def _model(service: Service, name: str, request: Request) -> dict[str, Any]:
    adapter = service.adapter(name)
    # The limit of a model that was never loaded is unknown.
    known = service.known if service.lead is service and len(service.models) == 1 else service.last_loaded
    limit = known.ready.max_model_len if known is not None else None
    if request.scope["weft.anthropic"]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": limit,
            "max_tokens": limit,
            "lifecycle": "active",
        }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "weft",
        "root": service.config.model_names[0] if adapter is None else adapter.path,
        "parent": None if adapter is None else service.config.model_names[0],
        "max_model_len": limit,
        "tasks": list(known.tasks) if known is not None else None,
        "input_modalities": ["text"] if known is None or known.images is None else ["text", "image"],
    }


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", summary="List the served models")
async def models(service: ServiceOf, request: Request) -> dict[str, Any]:
    """Uses Anthropic's format if the request has an `anthropic-version` header."""
    data = [
        _model(each, name, request)
        for each in service.models
        for name in (*each.config.model_names, *sorted(each.adapters.served))
    ]
    if request.scope["weft.anthropic"]:
        return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data}


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}", summary="Retrieve a model")
async def model(model: str, service: ServiceOf, request: Request) -> dict[str, Any]:
    return _model(service.for_model(model), model, request)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="200 while the engine makes progress, 503 if it has died or hangs")
async def health(service: ServiceOf) -> dict[str, Any]:
    dead = ApiError(503, "The engine has died.", code="engine_dead")
    reasons = [dead if each.phase is Phase.DEAD else each.stalled for each in service.models]
    if all(reasons) and reasons[0] is not None:
        raise reasons[0]
    if service.shared_state.engines > 1:
        return {"status": "ok", **_model_states(service), "engines": _engines(service)}
    stage = service.engine_stage()
    return {"status": "ok", **_sleep_state(service), **({"stage": stage} if stage else {})}


def _model_states(service: Service) -> dict[str, Any]:
    """The state of each model, if there are several."""
    if len(service.models) == 1:
        return _sleep_state(service)
    return {"models": [{"model": each.config.model_names[0], "state": each.state} for each in service.models]}


def _sleep_state(service: Service) -> dict[str, Any]:
    return {} if service.sleep_state is SleepState.AWAKE else {"model": service.sleep_state.word}


def _engines(service: Service, *, failures: bool = False) -> list[dict[str, Any]]:
    return [state for each in service.models for state in each.engine_states(failures=failures)]


@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="200 if the server accepts new work")
async def ready(service: ServiceOf) -> dict[str, Any]:
    for each in service.models:
        if each.starting and (reason := each.unready) is not None:
            raise reason
    reasons = [each.unready for each in service.models]
    if all(reasons) and reasons[0] is not None:
        raise reasons[0]
    out: dict[str, Any] = {"status": "ready", **_model_states(service)}
    if service.shared_state.engines > 1:
        out["engines"] = _engines(service)
    plan = service.metrics.plan
    if plan.serving < plan.pipelines:
        left_out = f", {plan.left_out} left out" if plan.left_out else ""
        out["plan"] = f"{plan.serving} of {plan.pipelines} pipelines{left_out}"
    return out


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceOf) -> Response:  # plain GETs bypass it, see `scrape`
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.head("/version", include_in_schema=False)
@router.get("/version", summary="Return the version of weft")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get(FAVICON, include_in_schema=False)
async def favicon() -> Response:
    """Browsers request it; the page has none."""
    return Response(status_code=204, headers={"cache-control": "max-age=86400"})


class EnginesBody(Body):
    engines: list[int] = Field([], max_length=64)


@router.get("/admin/engines", summary="List the engines and their states (admin key)")
async def engines(service: ServiceOf) -> dict[str, Any]:
    return {"engines": _engines(service, failures=True)}


@router.post("/admin/engines/restart", summary="Restart engines one by one and reload the model (admin key)")
async def restart_engines(body: EnginesBody, service: ServiceOf) -> Response:
    if service.restart_engines is None:
        raise ApiError(501, "This server's engines are not managed by a daemon.", code="not_supported")
    if refusal := await service.restart_engines(body.engines):
        raise ApiError(409, f"{refusal[0].upper()}{refusal[1:]}.", code="engines_not_restarted")
    return JSONResponse({"status": "begun"}, 202)


class ProfileBody(Body):
    seconds: float = Field(2.0, gt=0, le=60)
    engine: int = Field(0, ge=0)


@router.post("/admin/profile", summary="Profile an engine and return a Chrome trace (admin key)")
async def profile(body: ProfileBody, service: ServiceOf) -> Response:
    if not (replicas := [replica for each in service.models for replica in each.replicas]):
        _ = service.loaded  # raises the reason
    replica = next((each for each in replicas if each.engine == body.engine), None)
    if replica is None:
        raise bad_request(f"engine: engine {body.engine} is not running.", "engine")
    client = replica.client
    try:
        folder = tempfile.TemporaryDirectory(prefix="weft-profile-", ignore_cleanup_errors=True)
    except OSError as error:
        what = f"Cannot create a folder for the trace: {clip(error.strerror or str(error))}"
        where = "Make a temporary directory writable, or start the server with TMPDIR set to a writable directory"
        raise ApiError(500, f"{what}. {where}.", code="no_temporary_directory") from None
    with folder:
        trace = Path(folder.name) / "trace.json"
        client.profile(str(trace), body.seconds)
        try:
            async with asyncio.timeout(body.seconds + PROFILE_PATIENCE):
                while not trace.exists():
                    if not client.alive:
                        raise EngineDead
                    await asyncio.sleep(PROFILE_POLL)
        except TimeoutError:
            raise ApiError(504, "The engine did not write the trace in time.", code="timeout") from None
        return Response(await service.offload(trace.read_bytes), media_type="application/json")


@router.post("/admin/reset_prefix_cache", summary="Drop all cached prefixes (admin key)")
async def reset_prefix_cache(service: ServiceOf) -> dict[str, str]:
    for each in service.models:
        for replica in each.replicas:
            replica.client.reset_prefix_cache()
    return {"status": "ok"}


class ModelBody(Body):
    model: str | None = Field(None, max_length=512)  # the model's name, by default the first model


class SleepBody(ModelBody):
    level: Literal[0, 1, 2] = 1
    """0 only pauses: the model keeps its memory, and requests wait until an operator wakes it."""
    drain_seconds: float | None = Field(None, ge=0, le=86400)
    """Seconds for running requests to finish, by default --drain-timeout."""


@router.get("/admin/models", name="told_models", summary="List the models and their states (admin key)")
async def list_model_states(service: ServiceOf) -> dict[str, Any]:
    shared_state = service.shared_state
    return {
        "models": [
            {
                "model": each.config.model_names[0],
                "names": each.config.model_names,
                "state": each.state,
                **({"level": each.sleep_level} if each.sleep_level else {}),
                "memory_share": each.memory_share,
                "open_requests": int(shared_state.load[:, each.model, ENTERED].sum()),
                "last_used": time.time() - (time.monotonic() - used)
                if (used := shared_state.used[each.model])
                else None,
                "engines": each.engine_states(failures=True),
            }
            for each in service.models
        ]
    }


@router.post("/admin/sleep", summary="Put a model to sleep (admin key)")
async def sleep(body: SleepBody, service: ServiceOf) -> dict[str, Any]:
    """The model rejects new requests, finishes open ones and releases its memory. Returns once it is asleep."""
    return await put_to_sleep(service, body.model, body.level, body.drain_seconds)


async def put_to_sleep(service: Service, model: str | None, level: int, seconds: float | None) -> dict[str, Any]:
    """Put a model to sleep, or pause it (level 0), and return its new state. Raises `ApiError`."""
    chosen = service.for_model(model)
    if service.sleep is None:
        raise ApiError(501, "This server's engines are not managed by a daemon.", code="not_supported")
    return _new_state(chosen, await service.sleep(chosen.model, level, seconds))


@router.post("/admin/wake", summary="Wake a model (admin key)")
async def wake(body: ModelBody, service: ServiceOf) -> dict[str, Any]:
    """Returns once the model is awake. Other models are put to sleep if needed, as for a request."""
    return await wake_up(service, body.model)


async def wake_up(service: Service, model: str | None) -> dict[str, Any]:
    """Wake or resume a model and return its new state. Raises `ApiError`."""
    chosen = service.for_model(model)
    if service.wake is None:
        raise ApiError(501, "This server's engines are not managed by a daemon.", code="not_supported")
    return _new_state(chosen, await service.wake(chosen.model, True))


def _new_state(service: Service, refusal: str) -> dict[str, Any]:
    if refusal:
        raise ApiError(409, f"{refusal[0].upper()}{refusal[1:]}.", code="model_not_moved")
    return {"model": service.config.model_names[0], "state": service.state}
