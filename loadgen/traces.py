"""Reads recorded traffic (Azure CSV, Mooncake JSONL, weft JSONL) as arrival times and requests."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from weft.loadgen.arrivals import Times
from weft.loadgen.errors import LoadError

MOONCAKE_BLOCK = 512  # Tokens per hash id of a Mooncake trace.


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A recorded request. `content`: the prompt or messages to send, if the trace has them."""

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    content: str | list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, at: float, inputs: Any, outputs: Any, hash_ids: tuple[int, ...] = (), content: Any = None) -> TraceRow:
        """Lengths become at least 1: recorded requests without an answer have output 0, which cannot be requested."""
        return cls(at, max(1, int(inputs)), max(1, int(outputs)), hash_ids, content)


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival. `block`: tokens per hash id."""

    rows: list[TraceRow]
    block: int = MOONCAKE_BLOCK

    @property
    def times(self) -> Times:
        return np.array([row.at for row in self.rows])


def read_trace(path: Path) -> Trace:
    """Read a trace; its first line determines the format.

    - Azure LLM inference: CSV `TIMESTAMP,ContextTokens,GeneratedTokens`.
    - Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512 tokens each).
    - weft: JSON lines with `at` (s), `input_tokens`, `output_tokens`, and optionally `hash_ids`, `block_tokens`, as
      written by `weft load --record`. `prompt` or `messages` can replace `input_tokens`.

    Raises `LoadError` naming an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read --trace {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise LoadError(f"--trace {path} is empty")
    is_json = numbered[0][1].lstrip().startswith("{")
    rows, block = (_json_rows if is_json else _azure_rows)(path, numbered)
    if not rows:
        raise LoadError(f"--trace {path} has no requests")
    return Trace(sorted(rows, key=lambda row: row.at), block)


def _azure_rows(path: Path, lines: list[tuple[int, str]]) -> tuple[list[TraceRow], int]:
    header = [name.strip() for name in next(csv.reader([lines[0][1]]))]
    try:
        columns = [header.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    except ValueError:
        raise LoadError(
            f"--trace {path} is neither JSON lines nor a CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
        ) from None
    rows = []
    for number, line in lines[1:]:
        try:
            cells = next(csv.reader([line]))
            when, context, generated = (cells[i] for i in columns)
            # Timestamps have seven decimals and an optional zone, but datetime parses only six.
            main, _, fraction = when.strip().removesuffix("Z").split("+")[0].partition(".")
            at = datetime.fromisoformat(main + "+00:00").timestamp() + float(f"0.{fraction or 0}")
            rows.append(TraceRow.of(at, context, generated))
        except (ValueError, IndexError):
            raise LoadError(f"--trace {path}, line {number}: expected a timestamp and two lengths") from None
    return rows, MOONCAKE_BLOCK


def _json_rows(path: Path, lines: list[tuple[int, str]]) -> tuple[list[TraceRow], int]:
    rows, block = [], MOONCAKE_BLOCK
    for number, line in lines:
        try:
            row = orjson.loads(line)
            hash_ids = tuple(int(h) for h in row.get("hash_ids") or ())
            if "timestamp" in row:
                at = float(row["timestamp"]) / 1e3
                rows.append(TraceRow.of(at, row["input_length"], row["output_length"], hash_ids))
                continue
            block = int(row.get("block_tokens", block))
            content = row.get("messages") or row.get("prompt")
            inputs = row["input_tokens"] if content is None else row.get("input_tokens", 0)
            rows.append(TraceRow.of(float(row["at"]), inputs, row["output_tokens"], hash_ids, content))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LoadError(
                f"--trace {path}, line {number}: needs timestamp, input_length, output_length (Mooncake) "
                "or at, input_tokens, output_tokens (weft)"
            ) from None
    if block < 1:
        raise LoadError(f"--trace {path}: block_tokens must be at least 1")
    return rows, block
