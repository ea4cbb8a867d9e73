"""One server per test module, with a stub for its engine; helpers beside the tests are imported by name."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from stub import Server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _shared_server() -> AsyncIterator[Server]:
    from stub import serving

    async with serving() as server:
        yield server


@pytest.fixture
def server(_shared_server: Server) -> Server:
    """The module's server, with an engine that has forgotten earlier tests."""
    from stub import Script

    engine = _shared_server.engine
    engine.script = Script()
    engine.added.clear()
    engine.aborted.clear()
    return _shared_server
