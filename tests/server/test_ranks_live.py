"""A daemon whose engine is two processes: a rank that dies or stops, a drain, and what is left behind."""

from __future__ import annotations

import os
import signal
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
    with running(tmp_path, *OPTIONS) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 20)
            rank = rank_of(daemon)
            # What ranks share has no name that could stay behind.
            assert not any("/dev/shm/" in Path(f"/proc/{pid}/maps").read_text() for pid in (rank, daemon.engine_pid))
            os.kill(rank, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
            daemon.told("rank 1: its process ended (signal SIGKILL)")
            await until_status(http, "/ready", 200)
            assert await metric(http, 'weft_engine_restarts_total{engine="0"}') == 1
            tasks = await begin(http, 3)
            rank = rank_of(daemon)
            daemon.process.terminate()
            assert await codes(tasks) == {"[DONE]"}
        assert await ended(daemon) == 0
        assert gone(rank)


async def test_a_rank_that_stops_is_named_and_ended(tmp_path: Path) -> None:
    with running(tmp_path, *OPTIONS) as daemon:
        async with client(daemon) as http:
            rank = rank_of(daemon)
            os.kill(rank, signal.SIGSTOP)
            await until_status(http, "/health", 503)
            assert "rank 1" in (await http.get("/health")).json()["error"]["message"]
            await until(lambda: gone(rank))
            daemon.told("the engine (rank 1) hangs")
            # another engine is on its way, with another rank: neither outlives the daemon
            rank = await until(lambda: rank_of(daemon))
            daemon.process.kill()
            await until(lambda: gone(rank))
