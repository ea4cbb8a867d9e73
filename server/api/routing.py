"""How endpoints get their bodies and the service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from weft.server.api.service import Service
from weft.server.bodies import parse_json
from weft.server.errors import bad_request, clip

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""for the schema: what an endpoint answers beside JSON"""

LOGGED_BODY = 4096
"""bytes of a body that --log-requests shows at most"""

logger = logging.getLogger("weft.requests")


class JsonRequest(Request):
    """Reads bodies with `parse_json`."""

    async def json(self) -> Any:
        if hasattr(self, "_parsed"):
            return self._parsed
        try:
            self._parsed: Any = parse_json(await self.body())
            return self._parsed
        except ValueError as error:
            raise bad_request(f"The body is not valid JSON: {clip(str(error))}", code="invalid_json") from None


class JsonRoute(APIRoute):
    """A route whose body, if any, must be JSON and say so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def json_handler(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            if request.method == "POST" and self.body_field is not None:
                _require_json(request)
                await json_request.json()  # here: inside FastAPI the error would lose its message; the value is cached
                await _log_body(json_request)
            return await handler(json_request)

        return json_handler


async def _log_body(request: Request) -> None:
    service: Service = request.app.state.service
    if service.config.log_requests:
        body = (await request.body())[:LOGGED_BODY].decode(errors="replace")
        fields = {"request_id": request.scope["weft.request_id"], "body": body}
        logger.info("%s", request.scope["path"], extra={"fields": fields})


def _require_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise bad_request(f"Content-Type must be application/json, not '{clip(kind)}'.", code="wrong_content_type")


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]
