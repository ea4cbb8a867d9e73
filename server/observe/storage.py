"""`Storage`: which folders of the server cannot be written, for the metrics and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from weft.server.errors import ApiError
from weft.server.observe.exposition import family
from weft.server.observe.shared_state import STORES, SharedState

PROBE_SECONDS = 5.0  # seconds between attempts to write to a folder that fails

logger = logging.getLogger("weft")


class Storage:
    """The state of each store of `STORES` in this process, and in all processes of the daemon."""

    def __init__(self, shared_state: SharedState, row: int) -> None:
        self._failing = shared_state.failing
        self._row = row
        self._failing[row] = 0  # a predecessor may have ended while its store failed

    def failed(self, store: str, why: str) -> None:
        """Record that a store cannot be used. One line is logged until it works again."""
        column = STORES.index(store)
        if not self._failing[:, column].any():
            logger.error("storage of %s fails: %s", store, why)
        self._failing[self._row, column] = 1

    def worked(self, store: str) -> None:
        """Record that a store takes writes."""
        column = STORES.index(store)
        if self._failing[self._row, column]:
            self._failing[self._row, column] = 0
            if not self._failing[:, column].any():
                logger.warning("storage of %s works again", store)

    async def watch(self, probes: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Try stores that fail until cancelled. `probes` write to a store, and raise `ApiError` or `OSError` if that
        fails. Any other exception is a fault of the probe; the first is logged with its traceback."""
        faulty: set[str] = set()
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            for store, probe in probes.items():
                if self._failing[self._row, STORES.index(store)]:
                    try:
                        await probe()
                    except (ApiError, OSError) as error:
                        logger.debug("storage of %s still fails: %s", store, error)
                    except Exception:
                        if store not in faulty:
                            logger.warning("the check whether storage of %s works again failed", store, exc_info=True)
                        faulty.add(store)
                    else:
                        self.worked(store)

    def text(self) -> bytes:
        """Return the metric in Prometheus's text format."""
        failing = {store: float(self._failing[:, i].any()) for i, store in enumerate(STORES)}
        return family("weft_storage_failing", "gauge", "1 while a store cannot be used", "store", failing).encode()
