"""Parses and formats numbers with units."""

from __future__ import annotations

import math
import re

from weft.loadgen.errors import LoadError

MOST = 10**9  # Largest value of an option without a bound of its own; for times, in seconds.

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def seconds(text: str, option: str, *, exclusive: bool = False) -> float:
    """Parse `500ms`, `2s` or seconds without a unit, above 0 if `exclusive`. Raises `LoadError` naming `option`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or (match[2] or "s") not in _UNITS:
        raise LoadError(f"{option}: {text!r} is not a duration such as 500ms, 2s or 5m")
    if exclusive and not float(match[1]):
        raise LoadError(f"{option} must be more than 0")
    if (value := float(match[1]) * _UNITS[match[2] or "s"]) > MOST:
        raise LoadError(f"{option}: {text} must be at most {MOST}s")
    return value


def number(text: str, option: str, *, low: float = 0.0, most: float = MOST, exclusive: bool = False) -> float:
    """Parse a number from (or, if `exclusive`, above) `low` to `most`. Raises `LoadError` naming `option`."""
    try:
        value = float(text)
    except ValueError:
        raise LoadError(f"{option}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise LoadError(f"{option}: {text} is not a finite number")
    if value < low or (exclusive and value == low):
        raise LoadError(f"{option}: {text} must be {'more than' if exclusive else 'at least'} {low:g}")
    if value > most:
        raise LoadError(f"{option}: {text} must be at most {most:.12g}")
    return value


def whole(text: str, option: str, *, low: int = 1, most: int = MOST) -> int:
    """Parse a whole number from `low` to `most`. Raises `LoadError` naming `option`."""
    try:
        value = int(text)
    except ValueError:
        raise LoadError(f"{option}: {text!r} is not a whole number") from None
    if value < low:
        raise LoadError(f"{option}: {text} must be at least {low}")
    if value > most:
        raise LoadError(f"{option}: {text} must be at most {most}")
    return value


def show_seconds(value: float) -> str:
    """Format a duration with three significant digits: `12.3 ms`, `1.23 s`."""
    if value != value:
        return "–"
    if value == float("inf"):
        return "∞"
    if value < 1.0:
        return f"{value * 1e3:.3g} ms" if value < 0.9995 else "1 s"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def show_ratio(value: float) -> str:
    """Format a ratio with three significant digits."""
    return "–" if value != value else f"{value:.3g}"
