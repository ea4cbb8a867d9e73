"""The ASGI application: endpoints, middleware and error translation around one `Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path

from weft import __version__
from weft.engine.errors import WeftError
from weft.server.api import (
    adapters,
    aliases,
    batches,
    chat,
    completions,
    docs,
    embeddings,
    files,
    llama_cpp,
    messages,
    ollama,
    operations,
    scores,
    tokens,
    ui,
)
from weft.server.api.browsers import BrowserChecks
from weft.server.api.middleware import NOT_STORED_HEADER, Authorise, BodyLimit, Cors, Trace
from weft.server.api.other_fields import IGNORED_HEADER
from weft.server.api.protocol import ErrorBody
from weft.server.api.responses import conversations
from weft.server.api.responses import endpoints as responses
from weft.server.api.responses.background import Background
from weft.server.api.responses.store import Store
from weft.server.api.service import Service
from weft.server.batches.records import Folder
from weft.server.errors import ApiError, translate
from weft.server.keys import digest
from weft.server.observe.tracing import Spans


def create_app(service: Service) -> FastAPI:
    """The application. It answers 503 until `service.attach` adds an engine."""
    config = service.config
    app = FastAPI(
        title="weft",
        servers=[{"url": config.root_path}] if config.root_path else None,
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,  # FastAPI's pages load external scripts; `docs` serves one that does not
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.service = service
    app.state.responses = Store.open(config, service.metrics.storage)
    app.state.background = Background()
    stateful = (responses, conversations)
    common = (
        completions, chat, embeddings, scores, messages, *stateful, tokens, operations, adapters, ollama, llama_cpp,
        aliases, docs,
    )  # fmt: skip
    for module in (*common, *([ui] if config.ui else [])):
        app.include_router(module.router)
    for kind in (ApiError, WeftError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    # The last middleware added is the outermost.
    uploads = None
    if config.files_dir is not None:
        app.state.folder = Folder.open(config.files_dir, config.files_max_gib, service.metrics.storage)
        app.include_router(files.router)
        app.include_router(batches.router)
        app.state.runner = batches.make_batch_runner(app, service, app.state.folder)
        uploads = files.PATH
    app.add_middleware(BodyLimit, bounds=lambda: service.body_bounds, uploads=uploads)
    admin_key = digest(config.admin_api_key) if config.admin_api_key is not None else None
    salted = len(service.keys) > 1 if config.salt_per_key is None else config.salt_per_key
    app.state.browsers = BrowserChecks(config.allowed_host, config.cors_origin, service.local_hosts)
    app.add_middleware(
        Authorise, keys=service.keys, admin_key=admin_key, limits=service.limits, browsers=app.state.browsers,
        salted=salted,
    )  # fmt: skip
    spans = Spans.to(config.otlp_endpoint) if config.otlp_endpoint is not None else None
    app.add_middleware(Trace, metrics=service.metrics, log=config.access_log, spans=spans, root_path=config.root_path)
    app.state.spans = spans
    if config.cors_origin:
        app.add_middleware(
            Cors,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", IGNORED_HEADER, NOT_STORED_HEADER],
        )
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    response = translate(error).response(request.scope)
    if response.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request, response.headers.get("Allow", ""))))
    return response


def _methods(request: Request, allowed: str) -> set[str]:
    """All methods of the request's path. `allowed`: the router's header, which covers only one matching route."""
    methods = {method.strip() for method in allowed.split(",") if method}
    for template, path_item in request.app.openapi()["paths"].items():
        if compile_path(template)[0].match(request.scope["path"]):
            methods |= {method.upper() for method in path_item}
    return methods


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    metrics = app.state.service.metrics
    probes = {"responses": app.state.responses.probe}
    tasks = [asyncio.create_task(metrics.watch_event_loop())]
    if hasattr(app.state, "runner"):
        tasks.append(asyncio.create_task(app.state.runner.run()))
        probes["files"] = lambda: asyncio.to_thread(app.state.folder.files.probe)
    tasks.append(asyncio.create_task(metrics.storage.watch(probes)))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.state.background.close()
    app.state.responses.close()
    if app.state.spans is not None:
        app.state.spans.close()
