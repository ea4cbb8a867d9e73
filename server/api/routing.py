"""`JsonRoute` and `ServiceOf`: how endpoints get their bodies and the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, cast

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

from weft.server.api.other_fields import report, translated, unknown_fields
from weft.server.api.service import Service
from weft.server.bodies import Body, parse_json
from weft.server.errors import ApiError, bad_request, clip

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The schema of endpoints that also answer with a stream."""

LARGE_BODY = 2**18  # bytes above which a body is parsed in a thread

LOGGED_BODY = 4096  # bytes of a body that --log-requests logs

logger = logging.getLogger("weft.requests")


def request_schema(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that reads its body itself."""
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


class JsonRequest(Request):
    """Parses bodies with `parse_json`; parses and validates large ones off the event loop."""

    model: type[Body] | None = None  # the type of the body

    async def json(self) -> Any:
        if not hasattr(self, "_parsed"):
            data = await self.body()
            small = len(data) <= LARGE_BODY
            self._parsed: Any = self._read(data) if small else await asyncio.to_thread(self._read, data)
        return self._parsed

    def _read(self, data: bytes) -> Any:
        """The validated model, which FastAPI accepts as is; JSON that is no object as it is. Reports unknown fields."""
        service: Service = self.app.state.service
        try:
            service.body_bounds.check(data)
            value = parse_json(data)
        except ValueError as error:
            raise bad_request(f"The body is not valid JSON: {clip(str(error))}", code="invalid_json") from None
        if self.model is None or not isinstance(value, dict):
            return value
        fields, aliases = translated(self.model, value)
        try:
            body = self.model.model_validate(fields)
        except ValidationError as error:
            errors = [{**e, "loc": ("body", *_as_sent(e["loc"], aliases))} for e in error.errors()]
            raise RequestValidationError(errors, body=value) from None
        if unknown := list(unknown_fields(body, value)):
            path = self.scope["path"]
            self.scope["weft.ignored"] = report(path, unknown, strict=service.config.strict_fields)
        return body


def _as_sent(path: tuple[int | str, ...], aliases: dict[str, str]) -> tuple[int | str, ...]:
    """The path of a field under the name that the client used."""
    return (aliases.get(path[0], path[0]), *path[1:]) if path and isinstance(path[0], str) else path


class JsonRoute(APIRoute):
    """A route whose body, if any, must be JSON with a JSON content type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def json_handler(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            if request.method == "POST" and self.body_field is not None:
                _require_json(request)
                json_request.model = cast(type[Body], self.body_field.field_info.annotation)
                await _log_body(json_request)
                await json_request.json()  # FastAPI would drop the error's message; the value is cached
            return await handler(json_request)

        return json_handler


async def _log_body(request: Request) -> None:
    service: Service = request.app.state.service
    if service.config.log_requests:
        body = (await request.body())[:LOGGED_BODY].decode(errors="replace")
        fields = {"request_id": request.scope["weft.request_id"], "body": body}
        logger.info("%s", request.scope["path"], extra={"fields": fields})


def _require_json(request: Request) -> None:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"Content-Encoding '{clip(coding)}' is not supported; send the body uncompressed."
        raise ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"})
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise bad_request(f"Content-Type must be application/json, not '{clip(kind)}'.", code="wrong_content_type")


async def _service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_service)]
