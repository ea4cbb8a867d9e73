"""The engine process and its client: streams, aborts, errors, exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import zmq.asyncio

from weft.engine.config import EngineConfig
from weft.engine.errors import EngineDead, WeftError
from weft.engine.wire import client as wire_client
from weft.engine.wire.client import EngineClient
from weft.engine.wire.messages import EngineStats, Finish, Outputs, encoder
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.spawn import EngineProcess
from weft.engine.wire.streams import TokenStream

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 60
LONG = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)


async def _drain(stream: TokenStream) -> tuple[list[int], Finish, str | None]:
    tokens: list[int] = []
    while True:
        delta = await stream.read()
        tokens += delta.token_ids
        if delta.finish:
            return tokens, delta.finish, delta.error


@contextlib.asynccontextmanager
async def running(config: EngineConfig, clients: int = 1) -> AsyncIterator[tuple[EngineProcess, list[EngineClient]]]:
    """An engine process and its clients, which are notified of its end."""
    process = await EngineProcess.start(config)
    connected = [EngineClient(process.address, i) for i in range(clients)]

    async def watch() -> None:
        why = await process.wait_dead()
        for client in connected:
            client.mark_dead(why)

    watching = asyncio.create_task(watch())
    try:
        yield process, connected
    finally:
        await process.stop()
        await watching
        for client in connected:
            client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Callable[[str], Path]) -> AsyncIterator[tuple[EngineProcess, list[EngineClient]]]:
    """One engine for all tests that leave it unchanged, and its first three clients."""
    async with running(EngineConfig(model=str(tiny_model("yi")), page_size=8, num_pages=200), clients=3) as engine:
        await engine[1][0].wait_ready()
        yield engine


@pytest.fixture
def client(engine: tuple[EngineProcess, list[EngineClient]]) -> EngineClient:
    return engine[1][0]


async def test_streams_deliver_the_engines_output(client: EngineClient) -> None:
    streams = [client.submit([5, 6, 7 + i], LONG) for i in range(20)]
    results = await asyncio.gather(*map(_drain, streams))
    assert all(len(tokens) == TOKENS and finish is Finish.LENGTH for tokens, finish, _ in results)
    again, _, _ = await _drain(client.submit(np.array([5, 6, 7]), LONG))
    assert again == results[0][0]
    assert client.num_open == 0


async def test_a_refused_request_gets_its_reason(client: EngineClient) -> None:
    tokens, finish, error = await _drain(client.submit([], LONG))
    assert (tokens, finish, error) == ([], Finish.REFUSED, "the prompt is empty")


async def test_an_aborted_request_frees_its_pages(client: EngineClient) -> None:
    stream = client.submit([5], LONG)
    await stream.read()
    stream.abort()
    stream.abort()
    for _ in range(100):
        await _drain(client.submit([9], SamplingParams(max_tokens=1)))
        if client.stats.scheduler.pages_held == 0 and client.stats.scheduler.running == 0:
            return
    pytest.fail("the aborted request still holds pages")


async def test_clients_get_their_own_tokens_and_all_see_the_statistics(
    engine: tuple[EngineProcess, list[EngineClient]],
) -> None:
    _, clients = engine
    before = clients[0].stats.scheduler.generation_tokens
    alone = [(await _drain(clients[0].submit([5 + i, 9], LONG)))[0] for i in range(3)]
    # The same prompts at once, each from another client: handles differ, so a mix-up would show.
    together = await asyncio.gather(*(_drain(c.submit([5 + i, 9], LONG)) for i, c in enumerate(clients)))
    assert [tokens for tokens, _, _ in together] == alone
    async with asyncio.timeout(240):
        while len({client.stats.scheduler.generation_tokens for client in clients}) > 1:
            await asyncio.sleep(0.01)
    assert clients[2].stats.scheduler.generation_tokens == before + 6 * TOKENS


async def test_requests_of_a_disconnected_client_are_dropped_and_others_continue(
    engine: tuple[EngineProcess, list[EngineClient]],
) -> None:
    process, (watcher, other, _) = engine
    gone = EngineClient(process.address, 3)
    endless = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
    lost = [gone.submit([5, 6 + i], endless) for i in range(8)]
    kept = asyncio.create_task(_drain(other.submit([5, 6], LONG)))
    await asyncio.gather(*(stream.read() for stream in lost))
    gone.close()  # a killed process sends nothing
    watcher.client_gone(3)
    tokens, finish, _ = await kept
    assert (len(tokens), finish) == (TOKENS, Finish.LENGTH)
    await _drain(other.submit([9], SamplingParams(max_tokens=2)))
    async with asyncio.timeout(240):
        while watcher.stats.scheduler.pages_held or watcher.stats.scheduler.running:
            await _drain(other.submit([9], SamplingParams(max_tokens=1)))


async def test_messages_of_a_disconnected_client_are_dropped(engine: tuple[EngineProcess, list[EngineClient]]) -> None:
    process, (watcher, other, _) = engine
    gone = EngineClient(process.address, 4)
    await _drain(gone.submit([5], SamplingParams(max_tokens=1)))
    watcher.client_gone(4)
    await _drain(watcher.submit([5], SamplingParams(max_tokens=1)))  # the engine has been notified by now
    gone.submit([5, 6], LONG)
    done = watcher.stats.scheduler.generation_tokens
    await _drain(other.submit([5, 7], LONG))
    async with asyncio.timeout(240):
        while watcher.stats.scheduler.generation_tokens < done + TOKENS:
            await asyncio.sleep(0.01)
    stats = watcher.stats.scheduler
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert stats.generation_tokens == done + TOKENS
    gone.close()


async def test_killing_the_engine_ends_every_stream_of_every_client() -> None:
    async with running(EngineConfig(), clients=2) as (process, clients):
        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        streams = [clients[i % 2].submit([5 + i], endless) for i in range(20)]
        await asyncio.gather(*(s.read() for s in streams))
        os.kill(process.pid, signal.SIGKILL)
        results = await asyncio.gather(*map(_drain, streams), return_exceptions=True)
        assert all(isinstance(r, EngineDead) for r in results)
        assert not clients[0].alive
        assert "SIGKILL" in await process.wait_dead()
        with pytest.raises(EngineDead):
            clients[1].submit([5], LONG)


async def test_an_engine_that_cannot_start_reports_the_reason_to_every_client() -> None:
    async with running(EngineConfig(model="/nowhere"), clients=2) as (process, clients):
        why = await process.wait_dead()
        late = EngineClient(process.address, 2)
        late.mark_dead(why)
        for client in (*clients, late):
            with pytest.raises(WeftError, match="no model directory"):
                await client.wait_ready()
        late.close()


async def test_the_engine_exits_when_the_daemon_closes_its_stdin(tiny_model: Callable[[str], Path]) -> None:
    async with running(EngineConfig(model=str(tiny_model("yi")))) as (process, (client,)):
        await client.wait_ready()
        await process.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_messages_sent_before_an_engine_exited_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals of a stopped engine once lacked its last iteration."""
    monkeypatch.setattr(wire_client, "QUIET_SECONDS", 3.0)  # a machine may pause for a while
    monkeypatch.setattr(wire_client, "DRAIN_SECONDS", 240.0)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = EngineClient(f"tcp://127.0.0.1:{port}", 3)
    peer, _ = await router.recv_multipart()

    async def late() -> None:
        for iterations in range(1, 5):
            await asyncio.sleep(0.02)
            await router.send_multipart((peer, encoder.encode(Outputs(stats=EngineStats(iterations=iterations)))))

    sending = asyncio.create_task(late())
    client.mark_dead("the engine ended")
    await client.drain()
    assert client.stats.iterations == 4
    await sending
    client.close()
    router.close(0)
    context.term()
