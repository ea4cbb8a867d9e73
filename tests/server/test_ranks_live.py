"""A daemon whose engine is two processes: a rank that dies or stops, a drain, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from live import Daemon, command_line, running
from test_supervision import begin, client, codes, ended, metric, until, until_status

pytestmark = pytest.mark.slow

RANK = "weft.engine.ranks.process"
OPTIONS = (
    "--device", "cpu", "--tensor-parallel-size", "2", "--max-num-batched-tokens", "128", "--host-kv-gib", "0.02",
    "--hang-timeout", "6", "--engine-restart-limit", "3",
)  # fmt: skip


def rank_of(daemon: Daemon) -> int:
    """Process id of rank 1; 0 while there is none."""
    for engine in daemon.children("weft.engine.process"):
        for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split():
            if RANK in command_line(pid):
                return int(pid)
    return 0


def gone(pid: int) -> bool:
    return RANK not in command_line(pid)


async def test_a_killed_rank_is_told_and_replaced_and_a_drain_ends_all_ranks(tmp_path: Path) -> None:
    segments = set(os.listdir("/dev/shm"))
    with running(tmp_path, *OPTIONS) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 100)
            rank, begun = rank_of(daemon), time.monotonic()
            os.kill(rank, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
            assert time.monotonic() - begun < 30  # two, on an idle machine
            await until(lambda: "rank 1: its process ended (signal SIGKILL)" in daemon.stderr())
            await until_status(http, "/ready", 200)
            assert await metric(http, 'weft_engine_restarts_total{engine="0"}') == 1
            tasks = await begin(http, 3)
            rank = rank_of(daemon)
            daemon.process.terminate()
            assert await codes(tasks) == {"[DONE]"}
        assert await ended(daemon) == 0
        assert gone(rank)
    assert set(os.listdir("/dev/shm")) <= segments


async def test_a_rank_that_stops_is_named_and_ended(tmp_path: Path) -> None:
    with running(tmp_path, *OPTIONS) as daemon:
        async with client(daemon) as http:
            rank = rank_of(daemon)
            os.kill(rank, signal.SIGSTOP)
            await until_status(http, "/health", 503, 30)
            assert "rank 1" in (await http.get("/health")).json()["error"]["message"]
            await until(lambda: gone(rank))
            await until(lambda: "the engine (rank 1) hangs" in daemon.stderr())  # a thread of its own writes it
            # another engine is on its way, with another rank: neither outlives the daemon
            rank = await until(lambda: rank_of(daemon))
            daemon.process.kill()
            await until(lambda: gone(rank))
