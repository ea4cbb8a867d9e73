"""Runs against a server on a real socket: the requests, their times, and the results."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from driving import content, drive, target, workload
from sse_server import serving

from weft.loadgen import client as client_module
from weft.loadgen.client import Client
from weft.loadgen.driver import Driver, Job
from weft.loadgen.lengths import Lengths
from weft.loadgen.measures import Measures
from weft.loadgen.record import Outcome, Record
from weft.loadgen.stream import AnswerReader
from weft.loadgen.workload import ArrivalOptions

ONE = ArrivalOptions("constant", 100.0, count=1)


async def ask(stub: Any, **fields: Any) -> Record:
    load = workload(ONE, kind="words" if fields.get("chat") else "ids")
    (record,) = (await drive(stub, load, **fields)).records
    return record


async def test_every_token_of_an_answer_is_timed() -> None:
    async with serving() as stub:
        record = await ask(stub)
    assert record.outcome is Outcome.OK
    assert len(record.times) == record.completion_tokens == 8
    assert record.prompt_tokens == 16
    assert record.due <= record.start <= record.first == record.times[0] <= record.times[-1] == record.end
    body = stub.requests[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (8, 8, True)


@pytest.mark.parametrize("fields", [{"crlf": True}, {"spaced": True}, {"split": True}, {"usage": False}])
@pytest.mark.parametrize("chat", [False, True])
async def test_servers_with_different_event_formats_count_the_same(fields: dict[str, bool], chat: bool) -> None:
    async with serving(**fields) as stub:
        record = await ask(stub, chat=chat)
    assert record.ok
    assert record.received_tokens == len(record.times) == 8


async def test_known_latencies_are_measured_within_two_milliseconds() -> None:
    """Latencies are known from the server's write times, because a busy machine makes its sleeps longer. The test
    compares medians for the same reason."""
    async with serving(ttft=0.05, itl=0.005) as stub:
        outcomes = await drive(stub, workload(ArrivalOptions("constant", 20.0, count=20), content(outputs=20)))
    measures = Measures(outcomes.records)
    written = np.array(stub.written).reshape(20, 20)
    ttft = written[:, 0] - np.array(stub.arrivals)
    assert np.median(ttft) >= 0.05
    assert np.median(np.abs(measures.ttft - ttft)) < 0.002
    assert np.median(np.abs(measures.itl - np.diff(written).flatten())) < 0.002
    assert np.median(np.abs(measures.tpot - (written[:, -1] - written[:, 0]) / 19)) < 0.002
    # from the connection on, which the stub does not see
    assert np.median(np.abs(measures.e2e - (written[:, -1] - np.array(stub.arrivals)))) < 0.005


async def test_requests_leave_on_schedule_even_if_the_server_is_slow() -> None:
    """Coordinated omission: a server that answers no request before the last one arrives slows no arrival down."""
    async with serving(holds=40) as stub:
        outcomes = await drive(stub, workload(ArrivalOptions("constant", 50.0, count=40), content(outputs=1)))
    due = np.array([record.due for record in outcomes.records])
    assert due.tolist() == [i / 50 for i in range(40)]
    assert all(record.ok for record in outcomes.records)
    assert max(record.start for record in outcomes.records) < min(record.end for record in outcomes.records)


@pytest.mark.parametrize(
    ("fields", "outcome", "status", "error"),
    [
        ({"statuses": (503,)}, Outcome.OVERLOADED, 503, "Status 503."),
        ({"statuses": (429,)}, Outcome.OVERLOADED, 429, "Status 429."),
        ({"statuses": (500,)}, Outcome.REFUSED, 500, "Status 500."),
        ({"breaks_after": 3}, Outcome.BROKEN, 0, "connection"),
        ({"error_after": 3}, Outcome.BROKEN, 0, ""),
        ({"breaks_after": 0}, Outcome.CONNECTION, 0, "connection"),
        ({"tokens": 0}, Outcome.BROKEN, 200, "without a token"),
    ],
)
async def test_every_kind_of_failure_has_a_name(
    fields: dict[str, Any], outcome: Outcome, status: int, error: str
) -> None:
    async with serving(**fields) as stub:
        record = await ask(stub)
    assert (record.outcome, record.status) == (outcome, status)
    assert error in record.error
    assert not record.ok


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("beginning", "again", "error"),
    [
        (b"HTTP/1.1 200 O", b"K" * 4096, "headers of more than 256 KiB"),
        (STREAM + b"X-Long: ", b"x" * 4096, "headers of more than 256 KiB"),
        (STREAM, b"X: y\r\n" * 512, "headers of more than 256 KiB"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 512, "headers of more than 256 KiB"),
        (STREAM + b"\r\n0\r\nX-Trailer: ", b"x" * 4096, "headers of more than 256 KiB"),
        (STREAM + b"\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n", "an event of more than 4 MiB"),
    ],
)
async def test_an_endless_answer_is_given_up_and_named(beginning: bytes, again: bytes, error: str) -> None:
    written = [0]

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(beginning)
        with suppress(ConnectionError, RuntimeError):  # uvloop: RuntimeError
            while True:
                writer.write(again)
                await writer.drain()
                written[0] += len(again)

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    record = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    assert (record.outcome, record.error) == (Outcome.BROKEN, error)
    assert written[0] < 32 << 20


async def test_a_timeout_is_a_failure_and_keeps_the_received_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[asyncio.Timeout] = []
    readers: list[AnswerReader] = []
    timeout_at = asyncio.timeout_at

    def limited(when: float) -> asyncio.Timeout:
        limits.append(timeout_at(when))
        return limits[-1]

    def reader(*arguments: Any, **options: Any) -> AnswerReader:
        readers.append(AnswerReader(*arguments, **options))
        return readers[-1]

    monkeypatch.setattr(asyncio, "timeout_at", limited)
    monkeypatch.setattr(client_module, "AnswerReader", reader)
    async with serving(itl=3600.0) as stub:
        asking = asyncio.create_task(ask(stub, timeout=1800.0))
        async with asyncio.timeout(240):
            while not readers or not readers[0].times:
                await asyncio.sleep(0.01)
        (limit,) = limits
        limit.reschedule(asyncio.get_running_loop().time())
        record = await asking
    assert (record.outcome, record.error) == (Outcome.TIMEOUT, "no complete answer within 1800 s")
    assert len(record.times) == 1


async def test_a_server_that_exited_is_a_failure_of_every_request() -> None:
    async with serving() as stub:
        pass
    outcomes = await drive(stub, workload(ArrivalOptions("constant", 100.0, count=3)))
    assert [record.outcome for record in outcomes.records] == [Outcome.CONNECTION] * 3


async def test_connections_are_reused_and_one_closed_by_the_server_is_replaced() -> None:
    async with serving() as stub:
        client = Client(target(stub), 0.0)
        body = client.target.body([1], 1)
        for _ in range(3):
            await client.send(Record(0, 0.0, 1, 1), body)
        assert stub.connections == 1
        client._pool._idle[0]._transport.close()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        record = Record(0, 0.0, 1, 1)
        await client.send(record, body)
        assert record.ok
        assert stub.connections == 2
        client.close()


async def test_a_closed_loop_has_no_more_requests_open_than_users() -> None:
    async with serving(ttft=0.02) as stub:
        load = workload(ArrivalOptions("closed", None, users=3, count=15), content(outputs=1))
        outcomes = await drive(stub, load)
    records = outcomes.records
    assert sorted(record.index for record in records) == list(range(15))
    edges = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    assert max(np.cumsum([step for _, step in edges])) <= 3


async def test_requests_that_still_run_after_the_drain_are_unfinished() -> None:
    async with serving(itl=60) as stub:
        outcomes = await drive(stub, workload(ArrivalOptions("constant", 100.0, duration=0.05)), drain=0.1)
    assert {record.outcome for record in outcomes.records} == {Outcome.UNFINISHED}
    assert len(outcomes.records) == 5


async def test_an_interrupted_run_keeps_its_measurements() -> None:
    async with serving(itl=0.001) as stub:
        load = workload(ArrivalOptions("constant", 20.0, duration=60.0))
        asyncio_loop = asyncio.get_running_loop()
        driver = Driver(Job(load, target(stub), asyncio_loop.time()))
        asyncio_loop.call_later(0.3, driver.stop)
        outcomes = await driver.run()
    assert outcomes.interrupted
    assert 3 <= len(outcomes.records) < 1200


async def test_conversations_send_their_whole_history() -> None:
    options = content(4, 3, turns=Lengths("constant", 3))
    async with serving() as stub:
        load = workload(ArrivalOptions("constant", 50.0, count=2), options, "words")
        outcomes = await drive(stub, load, chat=True)
    assert [(record.session, record.turn) for record in outcomes.records] == [
        (s, t) for s in range(2) for t in range(3)
    ]
    sizes = sorted(len(body["messages"]) for body in stub.requests)
    assert sizes == [1, 1, 3, 3, 5, 5]
    last = next(body["messages"] for body in stub.requests if len(body["messages"]) == 5)
    first = next(body["messages"] for body in stub.requests if body["messages"] == last[:1])
    assert first
    assert last[1] == {"role": "assistant", "content": "word word word "}
    for session in range(2):
        turns = [record for record in outcomes.records if record.session == session]
        assert all(later.start >= earlier.end for earlier, later in itertools.pairwise(turns))


async def test_a_conversation_ends_before_it_outgrows_the_context() -> None:
    options = content(20, 10, turns=Lengths("constant", 5))
    async with serving() as stub:
        outcomes = await drive(stub, workload(ONE, options, "words"), chat=True, context=80)
    assert len(outcomes.records) == 2  # 20 + 10, then 30 + 20 + 10; a third would be 90
    assert outcomes.conversations_cut == 1


async def test_only_the_first_request_of_a_conversation_includes_its_context() -> None:
    options = content(4, 3, turns=Lengths("constant", 3), context=40)
    async with serving() as stub:
        outcomes = await drive(stub, workload(ArrivalOptions("constant", 50.0, count=1), options, "words"), chat=True)
    assert len(outcomes.records) == 3
    (longest,) = (body["messages"] for body in stub.requests if len(body["messages"]) == 5)
    assert [len(message["content"].split()) for message in longest[::2]] == [44, 4, 4]


async def test_the_generator_measures_its_own_pauses() -> None:
    async with serving(itl=0.01) as stub:
        load = workload(ArrivalOptions("constant", 20.0, count=20))
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, time.sleep, 0.2)
        outcomes = await drive(stub, load)
    lags = np.asarray(outcomes.lags)
    # In a pause of 200 ms, with a probe every 5 ms, 40 probes are late: by 200, 195, …, 5 ms. A busy machine only adds
    # to it.
    assert lags.max() >= 0.19
    assert (lags > 0.01).sum() >= 36
    assert Measures(outcomes.records).lateness.max() > 0.1
