"""A server with a stub engine and a browser for each test module. Helpers next to the tests are imported by name."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from browser import Page
    from stub import Server


def fresh(server: Server) -> Server:
    """The server, with an engine that has forgotten earlier tests."""
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
    """The module's server with Hermes tool calls, reset likewise."""
    return fresh(_shared_hermes)


@pytest.fixture
def server(_shared_server: Server) -> Server:
    """The module's server, with an engine that has forgotten earlier tests."""
    return fresh(_shared_server)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    from browser import browsing

    async with browsing(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(_browser: Page) -> Page:
    """A fresh page of a module's browser."""
    await _browser.open()
    return _browser
