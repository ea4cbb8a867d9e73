"""Reads one value of a daemon's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from weft.server.observe.metrics import Metrics


def value_of(metrics: Metrics, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """None if there is no such sample."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = (s.value for family in families for s in family.samples if s.name == name and s.labels == (labels or {}))
    return next(found, None)
