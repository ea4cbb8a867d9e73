"""`Scrape`: an ASGI layer that answers `GET /metrics`."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.exposition import CONTENT_TYPE
from weft.server.metrics import Metrics


class Scrape:
    """Answers ahead of the application: its way to an endpoint costs more CPU than the answer, and scrapes are many."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD"):
            answer = Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
