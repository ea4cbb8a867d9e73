"""Prometheus's text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def head(name: str, kind: str, help: str) -> str:
    """Return the lines before a metric's samples. `help`: one line without a backslash."""
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def labelled(labels: Mapping[str, str]) -> str:
    """Format `{name="value",…}`; empty without labels."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
