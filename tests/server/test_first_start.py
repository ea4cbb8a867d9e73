"""Several engines, of which one serves already while another is at its first start: the end of open streams when the
daemon exits then. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from free_port import free_port
from live import Daemon, command_line, stop
from test_supervision import begin, client, codes, until, until_status

pytestmark = pytest.mark.slow

OPTIONS = ("--device", "cpu", "--replicas", "2", "--num-pages", "400", "--drain-timeout", "240")


@pytest.mark.parametrize("how", ["the other engine is killed", pytest.param("SIGTERM", marks=pytest.mark.nightly)])
async def test_streams_of_the_only_ready_engine_get_their_end(tmp_path: Path, how: str) -> None:
    port = free_port()
    daemon = Daemon(tmp_path / "log", "--port", str(port), *OPTIONS)
    daemon.url = f"http://127.0.0.1:{port}"
    late = 0
    try:
        _, late = await until(lambda: engines if len(engines := daemon.children("weft.engine.process")) == 2 else ())
        stop(late)
        async with client(daemon) as http:
            await until_status(http, "/ready", 200)
            if how == "SIGTERM":
                tasks = await begin(http, 3, max_tokens=400)
                daemon.process.terminate()
                assert await codes(tasks) == {"[DONE]"}
            else:
                tasks = await begin(http, 3)
                os.kill(late, signal.SIGKILL)
                assert await codes(tasks) == {"draining"}
        status = await asyncio.to_thread(daemon.process.wait, 240)
    finally:
        daemon.end()
        if "weft.engine.process" in command_line(late):  # stopped too early to end with the daemon
            os.kill(late, signal.SIGKILL)
    assert status == (0 if how == "SIGTERM" else 1)
    assert "Traceback" not in daemon.stderr()
