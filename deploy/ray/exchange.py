"""`Question` and `Head`: what the ingress sends a replica, and what comes back before the body."""

from __future__ import annotations

from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]

OF_THE_CONNECTION = frozenset(
    {b"connection", b"content-length", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""headers that belong to a hop and not to a message"""


@dataclass(frozen=True)
class Question:
    """A request of HTTP, whole.

    keys: of its prompt's blocks (`prompt.prompt_keys`). size: bytes of the prompt. avoid: replicas that refused it.
    """

    method: str
    target: str
    """path and query"""
    headers: Headers
    body: bytes = b""
    keys: tuple[bytes, ...] = ()
    size: int = 0
    avoid: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Head:
    """Of an answer. replica: who gave it."""

    status: int
    headers: Headers
    replica: str

    @property
    def is_stream(self) -> bool:
        return any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)


def end_to_end(headers: Headers) -> Headers:
    """Without those of a hop."""
    return [(name, value) for name, value in headers if name.lower() not in OF_THE_CONNECTION]
