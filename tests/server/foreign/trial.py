"""The attempts of a client's script. It runs in the client's environment, which has nothing of weft."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

Attempt = Callable[[], object]
_ATTEMPTS: list[tuple[str, str, Attempt]] = []
URL = sys.argv[1] if len(sys.argv) > 1 else ""
"""of the daemon"""
QUESTION = "What is 12 plus 30?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}


def tries(path: str, feature: str) -> Callable[[Attempt], Attempt]:
    """path: of the API, such as `chat`. feature: a column of the table in docs/clients.md."""

    def keep(attempt: Attempt) -> Attempt:
        _ATTEMPTS.append((path, feature, attempt))
        return attempt

    return keep


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def run() -> None:
    """Print the result of each attempt as a line of JSON: path, feature, error."""
    for path, feature, attempt in _ATTEMPTS:
        begun, wrong = time.monotonic(), ""
        try:
            attempt()
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps([path, feature, wrong, round(time.monotonic() - begun, 2)]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # also ends threads that a client did not stop
