"""The response to `GET /metrics`, which `connection` sends without the application."""

from __future__ import annotations

from weft.server.observe.exposition import CONTENT_TYPE
from weft.server.observe.metrics import Metrics

_HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: ".encode()


def scrape(metrics: Metrics) -> bytes:
    """Return head and body. The next scrape counts this one."""
    body = metrics.render()
    metrics.requests.labels("/metrics", "200").inc()
    return b"%b%d\r\n\r\n%b" % (_HEAD, len(body), body)
