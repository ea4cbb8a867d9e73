"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.loadgen.errors import LoadError
from weft.loadgen.units import number, whole

Counts = NDArray[np.int64]

LONGEST = 2**27  # Largest number of tokens of a prompt or an answer.


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution: `constant` (a), `uniform` (a to b inclusive) or `lognormal` (mean a, deviation b)."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: np.random.Generator, n: int) -> Counts:
        """Draw `[n]` lengths of at least one token."""
        if self.kind == "constant":
            return np.full(n, int(self.a), np.int64)
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b), n, endpoint=True)
        variance = np.log1p((self.b / self.a) ** 2)
        drawn = rng.lognormal(np.log(self.a) - variance / 2, np.sqrt(variance), n)
        return np.clip(np.rint(drawn), 1, LONGEST).astype(np.int64)

    def __str__(self) -> str:
        if self.kind == "constant":
            return f"{self.a:g} tokens"
        if self.kind == "uniform":
            return f"uniform from {self.a:g} to {self.b:g} tokens"
        return f"log-normal, mean {self.a:g}, standard deviation {self.b:g} tokens"


PRESETS = {
    "splitwise": (Lengths("lognormal", 1155, 1109), Lengths("lognormal", 211, 163)),
    "lmsys": (Lengths("lognormal", 102, 169), Lengths("lognormal", 222, 210)),
    "sharegpt": (Lengths("lognormal", 246, 547), Lengths("lognormal", 322, 244)),
    "arxiv": (Lengths("lognormal", 10041, 5551), Lengths("lognormal", 471, 711)),
}
"""(input, output) with means and deviations of the NanoFlow paper's Table 4; `arxiv`: of the trace that POD-Attention's
artifact replays (2,895 papers and their summaries). The log-normal shape is our choice."""


def parse(text: str, option: str) -> Lengths:
    """Parse `128`, `uniform:64:256` or `lognormal:MEAN:SD`. Raises `LoadError` naming `option`."""
    match text.split(":"):
        case [_] | [_, ""]:
            return Lengths("constant", whole(text, option, most=LONGEST))
        case ["constant", length]:
            return Lengths("constant", whole(length, option, most=LONGEST))
        case ["uniform", a, b]:
            low, high = whole(a, option), whole(b, option, most=LONGEST)
            if low > high:
                raise LoadError(f"{option}: uniform:{low}:{high} has its bounds swapped")
            return Lengths("uniform", low, high)
        case ["lognormal", mean, deviation]:
            return Lengths(
                "lognormal", number(mean, option, low=1, most=LONGEST), number(deviation, option, most=LONGEST)
            )
    raise LoadError(f"{option}: {text!r} must be N, uniform:LOW:HIGH or lognormal:MEAN:SD")


def _tokens(value: object) -> int:
    """Convert a whole number, written as `7` or `7.0`. Raises `ValueError`."""
    number = float(str(value))
    if not number.is_integer():
        raise ValueError(f"{value} is not whole")
    return int(number)


def read_pairs(path: Path) -> Counts:
    """Read `[n, 2]` input and output lengths from a JSON list of pairs, or from the first two columns of a CSV.

    Raises `LoadError` for an unusable file."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".csv":
            rows = [row[:2] for row in csv.reader(text.splitlines()) if row]
            rows = rows[1:] if rows and not rows[0][0].strip()[:1].isdigit() else rows
        else:
            rows = json.loads(text)
        pairs = np.array([[_tokens(a), _tokens(b)] for a, b in rows], np.int64)
    except OSError as error:
        raise LoadError(f"cannot read --lengths {path}: {error.strerror}") from None
    except (ValueError, TypeError, OverflowError):
        raise LoadError(
            f"--lengths {path} must be a JSON list of [input, output] pairs, or a CSV of two columns"
        ) from None
    if not len(pairs) or pairs.min() < 1:
        raise LoadError(f"--lengths {path} needs at least one pair, and lengths of at least 1")
    if pairs.max() > LONGEST:
        raise LoadError(f"--lengths {path}: a length is at most {LONGEST}")
    return pairs
