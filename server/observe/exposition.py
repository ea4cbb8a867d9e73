"""Prometheus's text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def head(name: str, kind: str, help: str) -> str:
    """Return the lines before a metric's samples. `help`: one line without a backslash."""
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def labelled(labels: Mapping[str, str]) -> str:
    """Format `{name="value",…}`; empty without labels."""
    if not labels:
        return ""
    escaped = {name: value.translate(_ESCAPES) for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def family(name: str, kind: str, help: str, label: str, figures: Mapping[str, float]) -> str:
    """Format a metric with one label. `figures`: its values by label value."""
    lines = [f"{name}{labelled({label: value})} {float(figure)}\n" for value, figure in figures.items()]
    return head(name, kind, help) + "".join(lines)
