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


def fresh(server: Server) -> Server:
    """Its engine has forgotten earlier tests."""
    from stub import Script

    engine = server.engine
    engine.script = Script()
    engine.added.clear()
    engine.aborted.clear()
    return server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _shared_server() -> AsyncIterator[Server]:
    from stub import serving

    async with serving() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _shared_hermes() -> AsyncIterator[Server]:
    from stub import serving

    async with serving(tool_call_parser="hermes") as server:
        yield server


@pytest.fixture
def hermes(_shared_hermes: Server) -> Server:
    """The module's server with the Hermes form of calls, likewise."""
    return fresh(_shared_hermes)


@pytest.fixture
def server(_shared_server: Server) -> Server:
    """The module's server, with an engine that has forgotten earlier tests."""
    return fresh(_shared_server)
