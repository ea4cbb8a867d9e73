"""Defines `HttpRequest`, which the ingress sends to a replica, and `Head`, which precedes the answer's body."""

from __future__ import annotations

from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]

HOP_HEADERS = frozenset(
    {b"connection", b"content-length", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""Headers of a hop, not of the message."""


@dataclass(frozen=True)
class HttpRequest:
    """A complete HTTP request.

    keys: keys of its prompt's blocks (`prompt.prompt_keys`). size: bytes of the prompt. avoid: replicas to avoid.
    """

    method: str
    target: str
    """Path and query."""
    headers: Headers
    body: bytes = b""
    keys: tuple[bytes, ...] = ()
    size: int = 0
    avoid: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer. replica: the replica that gave it."""

    status: int
    headers: Headers
    replica: str

    @property
    def is_stream(self) -> bool:
        return any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)


def end_to_end(headers: Headers) -> Headers:
    """Remove hop headers."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]
