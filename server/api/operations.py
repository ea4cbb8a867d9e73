"""What operators, probes and routers ask: models, health, readiness, metrics, version, administration."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse

from weft import __version__
from weft.engine.errors import EngineDead
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.service import Phase, Service
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request
from weft.server.observe.exposition import CONTENT_TYPE

PROFILE_PATIENCE = 120.0
"""seconds beyond those asked for: torch's profiler takes its time to begin, and large traces to be written"""
PROFILE_POLL = 0.1
FAVICON = "/favicon.ico"

router = APIRouter(route_class=JsonRoute)


def _model(service: Service, name: str, request: Request) -> dict[str, Any]:
    if request.scope["weft.anthropic"]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": service.loaded.ready.max_model_len,
            "max_tokens": service.loaded.ready.max_model_len,
            "lifecycle": "active",
        }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "weft",
        "root": service.config.model_names[0],
        "parent": None,
        "max_model_len": service.loaded.ready.max_model_len,
    }


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", summary="The models served")
async def models(service: ServiceOf, request: Request) -> dict[str, Any]:
    """In Anthropic's form for who sends `anthropic-version`."""
    data = [_model(service, name, request) for name in service.config.model_names]
    if request.scope["weft.anthropic"]:
        return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data}


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}", summary="One model")
async def model(model: str, service: ServiceOf, request: Request) -> dict[str, Any]:
    return _model(service, service.model_name(model), request)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="200 while the engine lives and goes on; 503 when it has ended or hangs")
async def health(service: ServiceOf) -> dict[str, Any]:
    if service.phase is Phase.DEAD:
        raise ApiError(503, "The engine has ended.", code="engine_dead")
    if (reason := service.stalled) is not None:
        raise reason
    if service.board.engines > 1:
        return {"status": "ok", "engines": service.engine_states()}
    stage = service.engine_stage()
    return {"status": "ok", "stage": stage} if stage else {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="200 when new work is taken")
async def ready(service: ServiceOf) -> dict[str, Any]:
    if (reason := service.unready) is not None:
        raise reason
    told: dict[str, Any] = {"status": "ready"}
    if service.board.engines > 1:
        told["engines"] = service.engine_states()
    plan = service.metrics.plan
    if plan.serving < plan.pipelines:
        left_out = f", {plan.left_out} left out" if plan.left_out else ""
        told["plan"] = f"{plan.serving} of {plan.pipelines} pipelines{left_out}"
    return told


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceOf) -> Response:  # a plain GET is answered ahead of it, by `scrape`
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.head("/version", include_in_schema=False)
@router.get("/version", summary="The version of weft")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get(FAVICON, include_in_schema=False)
async def favicon() -> Response:
    """Browsers ask for one; the page has none."""
    return Response(status_code=204, headers={"cache-control": "max-age=86400"})


class EnginesBody(Body):
    engines: list[int] = Field([], max_length=64)


@router.get("/admin/engines", summary="The engines, and what each is at (admin key)")
async def engines(service: ServiceOf) -> dict[str, Any]:
    return {"engines": service.engine_states()}


@router.post("/admin/engines/restart", summary="Restart engines one by one, the model read anew (admin key)")
async def restart_engines(body: EnginesBody, service: ServiceOf) -> Response:
    if service.renew is None:
        raise ApiError(501, "No daemon watches this server's engines.", code="not_supported")
    if refusal := await service.renew(body.engines):
        raise ApiError(409, f"{refusal[0].upper()}{refusal[1:]}.", code="engines_not_restarted")
    return JSONResponse({"status": "begun"}, 202)


class ProfileBody(Body):
    seconds: float = Field(2.0, gt=0, le=60)
    engine: int = Field(0, ge=0)


@router.post("/admin/profile", summary="Record the engine for some seconds: a Chrome trace (admin key)")
async def profile(body: ProfileBody, service: ServiceOf) -> Response:
    replica = next((each for each in service.loaded.replicas if each.engine == body.engine), None)
    if replica is None:
        raise bad_request(f"engine: there is no engine {body.engine} now.", "engine")
    client = replica.client
    directory = Path(tempfile.mkdtemp(prefix="weft-profile-"))
    trace = directory / "trace.json"
    try:
        client.profile(str(trace), body.seconds)
        async with asyncio.timeout(body.seconds + PROFILE_PATIENCE):
            while not trace.exists():
                if not client.alive:
                    raise EngineDead
                await asyncio.sleep(PROFILE_POLL)
        return Response(await service.offload(trace.read_bytes), media_type="application/json")
    except TimeoutError:
        raise ApiError(504, "The engine has not written its trace.", code="timeout") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@router.post("/admin/reset_prefix_cache", summary="Forget all cached prefixes (admin key)")
async def reset_prefix_cache(service: ServiceOf) -> dict[str, str]:
    for replica in service.loaded.replicas:
        replica.client.reset_prefix_cache()
    return {"status": "ok"}
