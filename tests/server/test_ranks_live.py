"""A daemon whose engine is several processes: a rank that dies or stops, a drain, and leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from free_port import free_port
from live import Daemon, command_line, patched, running, stopped
from test_supervision import begin, client, codes, ended, metric, until, until_metric, until_status

from weft.engine.wire.stacks import threads

pytestmark = pytest.mark.slow

RANK = "weft.engine.ranks.process"
OPTIONS = (
    "--device", "cpu", "--max-num-batched-tokens", "128", "--host-kv-gib", "0.02", "--hang-timeout", "6",
    "--drain-timeout", "240", "--engine-restart-limit", "3",
)  # fmt: skip
RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])


def options(ranks: int) -> tuple[str, ...]:
    return (*OPTIONS, "--tensor-parallel-size", str(ranks))


def rank_of(daemon: Daemon, rank: int) -> int:
    """Process id of that rank; 0 if it does not exist."""
    for engine in daemon.children("weft.engine.process"):
        for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split():
            _, found, arguments = command_line(pid).partition(RANK)
            if found and arguments.split("\0")[1] == str(rank):
                return int(pid)
    return 0


def gone(pid: int) -> bool:
    return RANK not in command_line(pid)


@RANKS
async def test_a_killed_rank_is_reported_and_replaced_and_a_drain_ends_all_ranks(tmp_path: Path, ranks: int) -> None:
    last = ranks - 1
    with running(tmp_path, *options(ranks)) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 20)
            rank = rank_of(daemon, last)
            # Memory shared by ranks has no name that could stay behind.
            assert not any("/dev/shm/" in Path(f"/proc/{pid}/maps").read_text() for pid in (rank, daemon.engine_pid))
            os.kill(rank, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
            daemon.wait_for_log(f"rank {last}: its process ended (signal SIGKILL)")
            await until_status(http, "/ready", 200)
            await until_metric(http, 'weft_engine_restarts_total{engine="0"}', 1)
            assert daemon.stderr().count("its process ended") == 1
            tasks = await begin(http, 3, max_tokens=200)
            rank = rank_of(daemon, last)
            daemon.process.terminate()
            assert await codes(tasks) == {"[DONE]"}
        assert await ended(daemon) == 0
        await until(lambda: gone(rank))


@RANKS
async def test_a_stopped_rank_is_named_and_killed(tmp_path: Path, ranks: int) -> None:
    last = ranks - 1
    with running(tmp_path, *options(ranks)) as daemon:
        async with client(daemon) as http:
            rank = rank_of(daemon, last)
            os.kill(rank, signal.SIGSTOP)
            with stopped(daemon.process.pid):  # or it might have replaced the engine before this test reads the state
                reported = await until_status(http, "/health", 503)
            assert f"rank {last}" in reported.json()["error"]["message"]
            await until(lambda: gone(rank))
            daemon.wait_for_log(f"the engine (rank {last}) hangs")
            # another engine is starting, with another rank: neither outlives the daemon
            rank = await until(lambda: rank_of(daemon, last))
            daemon.process.kill()
            await until(lambda: gone(rank))


async def test_a_rank_killed_while_rank_0_imports_ends_the_start_at_once(tmp_path: Path) -> None:
    code = """
import time
from weft.engine.runner.start import warm_start as headstart
headstart._import = lambda *_: time.sleep(10_000)
"""
    daemon = Daemon(tmp_path / "stderr", *options(2), env=patched(tmp_path / "site", code))
    try:
        os.kill(await until(lambda: rank_of(daemon, 1)), signal.SIGKILL)
        assert await ended(daemon, 60) == 1
        assert daemon.stderr().splitlines()[-1] == "weft: rank 1: its process ended (signal SIGKILL)"
    finally:
        daemon.end()


async def test_a_rank_stopped_while_it_imports_ends_with_the_daemon(tmp_path: Path) -> None:
    code = """
import os, signal
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "weft.engine.ranks.links":
            os.kill(os.getpid(), signal.SIGSTOP)
sys.meta_path.insert(0, Finder())
"""
    daemon = Daemon(tmp_path / "stderr", *options(2), env=patched(tmp_path / "site", code, of=RANK))
    rank = 0
    try:
        rank = await until(lambda: rank_of(daemon, 1))
        await until(lambda: " T " in threads(rank))
        daemon.process.kill()
        await until(lambda: gone(rank), 60)
    finally:
        daemon.end()
        if rank and not gone(rank):
            os.kill(rank, signal.SIGKILL)


async def test_a_rank_that_hangs_at_a_start_is_named_with_its_own_stage(tmp_path: Path) -> None:
    code = """
import os, signal
from weft.engine.ranks import follower, runners
from weft.engine.runner.start import load
from weft.engine.wire.heartbeat import Heartbeat
stage = Heartbeat.stage
def read(spec, config, resolved, progress):
    os.kill(os.getpid(), signal.SIGSTOP)
    Heartbeat.stage = lambda self, text, seconds: stage(self, text, 0.0)  # what bounds it is --hang-timeout
    progress("reading", 1, 2)
    while True:
        signal.pause()
load.read_weights = read
"""
    port = free_port()
    env = patched(tmp_path / "site", code, of=RANK)
    daemon = Daemon(tmp_path / "stderr", *options(2), "--port", str(port), env=env)
    try:
        rank = await until(lambda: rank_of(daemon, 1))
        await until(lambda: " T " in threads(rank))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http, asyncio.timeout(240):
            while (await http.get("/health")).json()["stage"] != "waiting for the other ranks, 0 of 1":
                await asyncio.sleep(0.1)
            await asyncio.sleep(2)
            while await metric(http, 'weft_engine_last_beat_seconds{engine="0"}') > 1.5:  # rank 0 does not hang
                await asyncio.sleep(0.1)
        os.kill(rank, signal.SIGCONT)
        assert await ended(daemon) == 1
        reported = "weft: the engine (rank 1) hung at 'reading, 1 of 2': no progress for "
        assert daemon.stderr().splitlines()[-1].startswith(reported)
    finally:
        daemon.end()
