"""The check of stores that failed: what it logs, and that one faulty probe stops no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import numpy as np
import pytest

from weft.server.errors import ApiError
from weft.server.observe import storage
from weft.server.observe.shared_state import STORES

FAILING, OTHER = STORES[:2]


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def probe() -> None:
        raise error

    return probe


def warnings_of(
    failing: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> list[logging.LogRecord]:
    """What is logged as a warning while `FAILING` is tried until `OTHER`, which is tried after it, has been 3 times."""
    monkeypatch.setattr(storage, "PROBE_SECONDS", 0)
    state = SimpleNamespace(failing=np.ones((1, len(STORES)), np.uint8))
    tried = asyncio.Semaphore(0)

    async def other() -> None:
        tried.release()
        raise OSError

    async def watch() -> None:
        watched = storage.Storage(state, 0)  # type: ignore[arg-type]
        watched.failed(FAILING, "full")
        watched.failed(OTHER, "full")
        watching = asyncio.create_task(watched.watch({FAILING: failing, OTHER: other}))
        for _ in range(3):
            await asyncio.wait_for(tried.acquire(), 60)
        watching.cancel()

    with caplog.at_level(logging.WARNING, "weft"):
        asyncio.run(watch())
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_fault_of_the_probe_itself_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = warnings_of(raising(ZeroDivisionError("a bug")), caplog, monkeypatch)
    assert FAILING in record.getMessage()
    assert "ZeroDivisionError: a bug" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ApiError(507, "The disk is full.")])
def test_a_store_that_still_fails_is_not_logged_again(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warnings_of(raising(error), caplog, monkeypatch) == []
