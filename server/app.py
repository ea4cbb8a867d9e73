"""The ASGI application: endpoints, layers and error translation, put together around one `Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.engine.errors import WeftError
from weft.server import chat, completions, operations, tokens
from weft.server.errors import ApiError, translate
from weft.server.middleware import Authorise, BodyLimit, Trace
from weft.server.protocol import ErrorBody
from weft.server.service import Service


def create_app(service: Service) -> FastAPI:
    """The application; it serves 503 until `service.attach` has given it an engine."""
    config = service.config
    app = FastAPI(
        title="weft",
        version=__version__,
        lifespan=_lifespan,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.service = service
    for module in (completions, chat, tokens, operations):
        app.include_router(module.router)
    for kind in (ApiError, WeftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=int(config.max_body_mib * 2**20))
    app.add_middleware(Authorise, keys=config.api_key, admin_key=config.admin_api_key)
    app.add_middleware(Trace, metrics=service.metrics)
    return app


async def _on_error(_: Request, error: Exception) -> Response:
    return translate(error).response()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    watch = asyncio.create_task(app.state.service.metrics.watch_event_loop())
    yield
    watch.cancel()
