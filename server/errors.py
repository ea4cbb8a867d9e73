"""`ApiError`, the errors that clients see, and `translate`, which converts any exception to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from weft.engine.errors import EngineDead, RequestError

MAX_ECHO = 200  # characters of a client's input that a message may repeat

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_STATUS_MESSAGES = {404: "There is nothing at this path.", 405: "This path does not support this method."}


class ApiError(Exception):
    """An HTTP error in OpenAI's format. `retry_after`: seconds. `headers`: additional headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.retry_after = code, retry_after
        self.headers = headers or {}

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self, scope: Mapping[str, Any] | None = None) -> Response:
        """The error as a response. `scope`: the request's, since some paths use Anthropic's or Ollama's format."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        if scope is not None and scope.get("weft.anthropic"):
            body, status = anthropic_error(self, scope["weft.request_id"]), _anthropic_status(self)
        elif scope is not None and scope.get("weft.ollama"):
            body, status = orjson.dumps({"error": self.message}), self.status
        else:
            body, status = self.body(), self.status
        return Response(body, status, headers, media_type="application/json")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = frozenset({"queue_full", "queue_tokens_full"})


def _anthropic_status(error: ApiError) -> int:
    """Anthropic uses 529 for overload; other 503s remain."""
    return 529 if error.status == 503 and error.code in _OVERLOADED else error.status


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """The body of an error in Anthropic's format."""
    status, message = _anthropic_status(error), error.message.replace("].function.parameters", "].input_schema")
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # agents detect this phrase and shorten the conversation
    details = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": details, "request_id": request_id})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, theirs: str, ours: str) -> ApiError:
    """An error about the field `theirs` of a chat request as one about the client's field `ours`; others unchanged."""
    if not (error.param or "").startswith(theirs):
        return error
    return ApiError(
        error.status, error.message.replace(theirs, ours), param=ours, code=error.code, retry_after=error.retry_after,
        headers=error.headers,
    )  # fmt: skip


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """A 503: nothing was done, and the client may retry after `retry_after` seconds."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def clip(value: object) -> str:
    """A client's value, shortened for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def translate(error: Exception) -> ApiError:
    """The client's error for any exception."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(clip(str(error)), error.param)
        case EngineDead():
            return unavailable("The engine died while running this request.", "engine_dead", 10)
        case RequestValidationError():
            return _from_validation(error.errors(), error.body)
        case ValidationError():
            return _from_validation([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
        case ClientDisconnect():
            return ApiError(499, "The client disconnected.")  # for metrics and log only
        case HTTPException():
            status = error.status_code
            message = _STATUS_MESSAGES.get(status) or f"{HTTPStatus(status).phrase}."
            return ApiError(status, message, headers=error.headers)
        case _:
            return ApiError(500, "Internal server error.", code="internal_error")


def _from_validation(errors: Sequence[Any], body: Any = None) -> ApiError:
    """The first validation error, with the path of its field. `body`: used to shorten the path."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {clip(first['ctx']['error'])}", code="invalid_json")
    path = ""
    for part in _path_in_body(first, body):
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if first["type"] == "missing":
        what = "This field is required" if path else "The request needs a JSON body"
    else:
        what = clip(str(first["msg"]).removeprefix("Value error, "))
    if first["type"] in ("model_type", "dict_type"):
        what = "Input should be an object"
    if first["type"].startswith("int_") and isinstance(number := first.get("input"), float) and abs(number) >= 2**63:
        what = f"Input should be an integer between {-(2**63)} and {2**63 - 1}"  # JSON's larger integers become floats
    return bad_request(f"{clip(path)}: {what}" if path else what, clip(path) if path else None)


def _path_in_body(error: Any, body: Any) -> Sequence[str | int]:
    """The path of an error in the body, without the names of union members, which are not fields."""
    parts: Sequence[str | int] = error["loc"][1:]
    if body is None:
        return parts
    kept: list[str | int] = []
    value = body
    for i, part in enumerate(parts):
        following = parts[i + 1] if i + 1 < len(parts) else None
        if following is None and error["type"] == "missing":
            kept.append(part)
        elif _has(value, part):
            if following is not None and _has(value, following) and not _has(value[part], following):
                continue  # a union member named like one of the fields
            kept.append(part)
            value = value[part]
        elif isinstance(value, dict) and isinstance(part, str) and (places := _in_items(value, part)):
            field, number = places[0]
            kept += [field, number, part] if len(places) == 1 else [field, part]
            value = value[field][number][part]
    return kept or parts


def _has(value: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, dict) and part in value


def _in_items(value: dict[str, Any], part: str) -> list[tuple[str, int]]:
    """List fields that contain objects with `part`, and the objects' positions. Some fields, such as a message's cache
    mark, may also be set on an item of a list."""
    return [
        (field, number)
        for field, items in value.items()
        if isinstance(items, list)
        for number, item in enumerate(items)
        if isinstance(item, dict) and part in item
    ]
