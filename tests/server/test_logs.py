"""Logs: text or JSON, a line per request with its id and trace, no prompt text by default."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from stub import Server, serving

from weft.server.logs import JsonFormatter, TextFormatter
from weft.server.observe.tracing import parse

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def fields(caplog: pytest.LogCaptureFixture, name: str = "weft.access") -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == name]  # type: ignore[attr-defined]


async def answered(server: Server, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """The line is written after the last byte."""
    await server.settle(lambda: len(fields(caplog)) == count)


async def test_a_line_a_request_with_id_and_tokens_and_no_prompt(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for stream in (False, True):
        body = {"prompt": "my secret diary", "stream": stream}
        await server.post("/v1/completions", body, headers={"X-Request-Id": f"id-{stream}"})
    await server.post("/v1/completions?key=hidden", {"prompt": ""})
    await server.http.get("/health")
    await answered(server, caplog, 3)
    plain, streamed, refused = fields(caplog)
    assert (plain["request_id"], plain["status"], plain["client"]) == ("id-False", 200, "127.0.0.1")
    assert plain["prompt_tokens"] > 0
    assert plain["completion_tokens"] == streamed["completion_tokens"] == 3
    assert streamed["request_id"] == "id-True"
    assert refused["status"] == 400
    ours = [record for record in caplog.records if record.name.startswith("weft")]
    text = repr([(record.getMessage(), record.__dict__) for record in ours])
    assert "secret" not in text
    assert "hidden" not in text


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [("1.2.3.4", "1.2.3.4"), ("2001:db8::7", "2001:db8::7"), ("evil status=200", "-"), ("", "127.0.0.1")],
)
async def test_the_client_named_by_a_proxy_is_an_address(
    server: Server, caplog: pytest.LogCaptureFixture, forwarded: str, client: str
) -> None:
    caplog.set_level(logging.INFO)
    await server.post("/v1/completions", {"prompt": "hi"}, headers={"X-Forwarded-For": forwarded})
    await answered(server, caplog, 1)
    assert [line["client"] for line in fields(caplog)] == [client]


async def test_bodies_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(log_requests=True, access_log=False) as server:
        await server.post("/v1/completions", {"prompt": "my secret diary"}, headers={"X-Request-Id": "id"})
    assert fields(caplog) == []
    (logged,) = fields(caplog, "weft.requests")
    assert logged["request_id"] == "id"
    assert json.loads(logged["body"])["prompt"] == "my secret diary"


async def test_trace_context_is_passed_through(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    response = await server.http.get("/v1/models", headers={"traceparent": TRACE})
    assert response.headers["traceparent"] == TRACE
    response = await server.http.get("/v1/models", headers={"traceparent": "nonsense"})
    assert "traceparent" not in response.headers
    await answered(server, caplog, 2)
    with_trace, without = fields(caplog)
    assert (with_trace["trace_id"], with_trace["parent_id"]) == (TRACE[3:35], TRACE[36:52])
    assert "trace_id" not in without


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (TRACE, True),
        ("01" + TRACE[2:] + "-more", True),
        (None, False),
        ("", False),
        (TRACE.upper(), False),
        ("ff" + TRACE[2:], False),
        ("00-" + "0" * 32 + TRACE[35:], False),
        (TRACE[:36] + "0" * 16 + "-01", False),
        (TRACE[:-1], False),
    ],
)
async def test_trace_contexts_that_are_valid(header: str | None, valid: bool) -> None:
    assert (parse(header) is not None) == valid


async def test_formats() -> None:
    record = logging.LogRecord("weft", logging.WARNING, "", 0, "hello %s", ("you",), None)
    record.fields = {"status": 200, "body": "a\nb"}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed.pop("time").endswith("+00:00")
    expected = {"level": "warning", "logger": "weft", "message": "hello you", "status": 200, "body": "a\nb"}
    assert parsed == expected
    assert TextFormatter().format(record).endswith("WARNING weft: hello you status=200 body='a\\nb'")


class Collector(ThreadingHTTPServer):
    """Receives OTLP over HTTP, in a separate thread because an exiting daemon waits for it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.spans: list[Any] = []
        self.resources: list[Any] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        for part in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.server.resources.append(part.resource)
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def attributes(of: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in of.attributes}


async def test_a_collector_gets_a_span_a_request(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(otlp_endpoint=collector.endpoint) as server:
        headers = {"traceparent": TRACE, "X-Request-Id": "mine"}
        await server.post("/v1/completions", {"prompt": "hi", "stream": True}, headers=headers)
        await server.http.get("/v1/models/unknown")
        await server.http.get("/health")
        monkeypatch.setattr(server.service.loaded.text, "encode", lambda *_, **__: 1 / 0)
        await server.post("/v1/completions", {"prompt": "hi"})
    answered, unknown, failed = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (answered.name, answered.kind) == ("POST /v1/completions", answered.SPAN_KIND_SERVER)
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE[3:35], TRACE[36:52])
    assert answered.end_time_unix_nano > answered.start_time_unix_nano
    assert attributes(answered) == {
        "http.response.status_code": 200,
        "weft.request_id": "mine",
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 3,
    }
    assert (unknown.name, unknown.parent_span_id) == ("GET other", b"")
    assert attributes(unknown)["http.response.status_code"] == 404
    codes = [span.status.code for span in (answered, unknown, failed)]
    assert codes == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]
    assert attributes(collector.resources[0])["service.name"] == "weft"
