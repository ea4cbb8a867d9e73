"""Logs: text or JSON, a line a request with its id and trace, nothing of the prompt unless asked."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from stub import Server, serving

from weft.server.logs import JsonFormatter, TextFormatter
from weft.server.tracing import parse

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def fields(caplog: pytest.LogCaptureFixture, name: str = "weft.access") -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == name]  # type: ignore[attr-defined]


async def answered(server: Server, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """The line is written behind the last byte."""
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


async def test_bodies_are_logged_when_asked(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_spans_are_children_of_the_callers() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from weft.server.tracing import Spans

    exporter = InMemorySpanExporter()
    spans = Spans(exporter)
    span = spans.begin("POST /v1/completions", parse(TRACE), None)
    spans.end(span, {"http.response.status_code": 200})
    spans.close()
    (finished,) = exporter.get_finished_spans()
    assert finished.name == "POST /v1/completions"
    assert format(finished.parent.span_id, "016x") == TRACE[36:52]
    assert format(finished.context.trace_id, "032x") == TRACE[3:35]
    assert finished.attributes == {"http.response.status_code": 200}
