"""Logging to stderr, as text or as JSON. A record's `fields` (a mapping) become `key=value` pairs or JSON keys.

Logging never blocks on stderr, see `weft.engine.wire.log_sink`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson

from weft.engine.wire.log_sink import LogSink, install
from weft.server.config import ServeConfig


def configure(config: ServeConfig) -> None:
    """Set up logging, stderr and stdout of this process."""
    install()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # uvicorn's warnings are about clients' mistakes, which are answered.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for name in ("asyncio", "httpx", "urllib3", "opentelemetry"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))

    if isinstance(sys.stderr, LogSink):
        sys.stderr.dropped_message = lambda count: handler.format(_dropped(count))


def _dropped(count: int) -> logging.LogRecord:
    message = "%d log lines dropped: stderr was not read in time"
    return logging.LogRecord("weft", logging.WARNING, __file__, 0, message, (count,), None)


def count_dropped(count: Callable[[], None]) -> None:
    """Call `count` for each log line that this process drops."""
    if isinstance(sys.stderr, LogSink):
        sys.stderr.on_drop = count


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # A client's text must not be able to forge log lines.
        shown = (
            (name, repr(v) if isinstance(v, str) and not v.isprintable() else v) for name, v in _fields(record).items()
        )
        pairs = "".join(f" {name}={value}" for name, value in shown)
        return super().formatMessage(record) + pairs


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
