"""W3C trace context of requests, and optional OpenTelemetry spans."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from weft import __version__, install_hint
from weft.engine.errors import ConfigError

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


class TraceContext(NamedTuple):
    """A request's position in the caller's trace (https://www.w3.org/TR/trace-context/, section 3.2)."""

    traceparent: str
    trace_id: str
    parent_id: str


def parse(traceparent: str | None) -> TraceContext | None:
    """Parse a header. Returns None if it is absent or invalid."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    return TraceContext(match[0], match[1], match[2]) if match else None


class Spans:
    """Creates a span per request. Needs the `otel` extra."""

    def __init__(self, exporter: Any, service_name: str = "weft") -> None:
        """`exporter`: a `SpanExporter`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weft")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Spans:
        """Export spans to a collector with OTLP over HTTP. Raises `ConfigError` without the packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return cls(OTLPSpanExporter(endpoint=endpoint))
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs {error.name}: {install_hint('otel')}") from None

    def begin(self, name: str, context: TraceContext | None, tracestate: str | None) -> Any:
        from opentelemetry.trace import SpanKind

        carrier = {} if context is None else {"traceparent": context.traceparent, "tracestate": tracestate or ""}
        return self._tracer.start_span(name, context=self._propagator.extract(carrier), kind=SpanKind.SERVER)

    def end(self, span: Any, status: int, attributes: dict[str, Any]) -> None:
        """`status`: HTTP status of the response."""
        from opentelemetry.trace import StatusCode

        span.set_attributes({"http.response.status_code": status, **attributes})
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        self._provider.shutdown()
