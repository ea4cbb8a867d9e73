"""`BatchLine`: one request of an OpenAI batch file, and the line that answers it."""

from __future__ import annotations

import uuid
from typing import Any, Literal, NamedTuple, get_args

import orjson

from weft.server.bodies import parse_json
from weft.server.errors import clip

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
BEGINNING = '{"id":"batch_req_'
"""The start of every answer line."""
MAX_ID = 512
"""Characters of a custom_id."""


class LineError(Exception):
    """An invalid request line. `code` and `param` are OpenAI's."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


class BatchLine(NamedTuple):
    custom_id: str
    url: str
    """One of `ENDPOINTS`."""
    body: dict[str, Any]


def parse(line: bytes, endpoint: str | None = None) -> BatchLine:
    """Parse a request line. Raises `LineError`. `endpoint`: the required url, by default any of `ENDPOINTS`."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise LineError(f"is not JSON ({clip(str(error))})", "invalid_json_line") from None
    if not isinstance(value, dict):
        raise LineError("is not a JSON object", "invalid_json_line")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise LineError(f"needs a custom_id of 1 to {MAX_ID} characters", "invalid_custom_id", "custom_id")
    if value.get("method", "POST") != "POST":
        raise LineError("has a method other than POST", "invalid_method", "method")
    url, body = value.get("url"), value.get("body")
    if url not in ENDPOINTS or (endpoint is not None and url != endpoint):
        wanted = endpoint or " or ".join(ENDPOINTS)
        raise LineError(f"has the url {clip(url)}, not {wanted}", "invalid_url", "url")
    if not isinstance(body, dict):
        raise LineError("needs a body that is an object", "invalid_body", "body")
    if body.get("stream"):
        raise LineError("asks for a stream, which batches do not support", "invalid_body", "body.stream")
    return BatchLine(custom_id, url, body)


def answer(line: BatchLine, request_id: str, status: int, body: bytes) -> bytes:
    """The line of an HTTP answer, including errors."""
    try:
        value = orjson.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": value}
    return _encode(line.custom_id, response, None)


def failure(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request without an HTTP answer."""
    return _encode(custom_id, None, {"code": code, "message": message})


def succeeded(line: Any) -> bool:
    """Whether a parsed answer line reports success."""
    response = line.get("response") if isinstance(line, dict) else None
    return isinstance(response, dict) and response.get("status_code") == 200


def _encode(custom_id: str, response: Any, error: Any) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex[:24]}"
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
