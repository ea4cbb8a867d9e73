"""`BreakEvens`: the fastest measured attention launch for a hybrid batch, by batch sizes.

Learned from the rows of `weft bench attention --keep` and stored in one file per GPU, heads, page size and kernel
version. A file may also be shipped next to this module; none is yet. An engine with `--pod auto` uses the variant of
the nearest row. Without a file, or far from all rows, `work_lists.one_launch` decides. Reading needs no Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.kernels.common.gpu import gpu
from weft.kernels.common.source_digest import source_digest

SOURCES = (
    "attention/decode_attention", "attention/decode_hopper", "attention/decode_workspace", "attention/output",
    "attention/pod_hopper", "attention/pod_together", "attention/prefill_attention", "attention/prefill_hopper",
    "attention/scores", "attention/work_lists", "common/block_sizes", "common/dependent_launch", "common/hopper",
)  # fmt: skip
"""The modules of `kernels` that a timing of attention depends on."""
VARIANTS = ("whole", "all", "few", "half", "share", "tiles", "together")
"""Variants of one launch.

"whole", "all": all programs begin with decodes, so the lists run in sequence. Tiles are whole, or cut along their keys.
"few", "half", "share": some programs begin with decodes, the others with cut tiles. These are `FIRST_DECODERS`, half,
or the decodes' share of the work. "tiles": decodes are tiles of one query in the chunks' list. "together": every
program runs both lists at the same time."""
NUM_SEQUENTIAL = 2  # The first of `VARIANTS`, which run both lists in sequence.
REQUIRED = {"whole", "cut", "pod all", "pod few", "pod half"}
"""Timings that a batch must have. Those of other variants may be missing."""
MARGIN = 1.02
"""A variant replaces "all", or a mixed one a sequential one, only if it is faster by this factor."""
NEIGHBOURS = 4
"""Batches that decide a row's variant, including its own, because a single timing may be an outlier."""
NEAR = 1.0  # The largest distance of such neighbors: the sum of |log2| over the sizes.
FAR = 2.0  # A batch farther than this from every row counts as not measured.
MAX_ROWS = 20_000
SHIPPED = Path(__file__).parent  # Folder of shipped tables, named as `write` names them.


class TableKey(NamedTuple):
    """The GPU and shape that a table was measured on."""

    gpu: str
    sms: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    triton: str
    kernels: str  # Digest of the kernels' code.

    @classmethod
    def here(cls, heads: int, kv_heads: int, head_dim: int, page_size: int) -> TableKey:
        """Return the identity for this process's GPU and kernels."""
        found = gpu()
        assert found is not None
        triton = importlib.import_module("triton").__version__
        return cls(found.name, found.sms, heads, kv_heads, head_dim, page_size, triton, source_digest(*SOURCES))


class BreakEven(NamedTuple):
    """A row of the table: tokens of the chunk and its context, decodes and tokens of each, the variant, and the
    number of programs that begin with decodes."""

    chunk: float
    context: float
    decodes: float
    length: float
    variant: str
    programs: int

    @property
    def cuts(self) -> bool:
        """Whether tiles may be cut along their keys."""
        return self.variant != "whole"


def _coordinates(chunk: float, context: float, decodes: float, length: float) -> tuple[float, ...]:
    """Return log2 coordinates. The chunk is part of its context: its last tile reads both."""
    return math.log2(chunk), math.log2(context + chunk), math.log2(decodes), math.log2(length)


class BreakEvens:
    """A table with lookups that take microseconds."""

    def __init__(self, rows: Sequence[BreakEven]) -> None:
        self.rows = tuple(rows)
        self._at = np.array([_coordinates(*row[:4]) for row in self.rows], np.float64).reshape(-1, 4).T.copy()

    def nearest(self, chunk: float, context: float, decodes: float, length: float) -> BreakEven | None:
        """Return the row for a batch, or None if nothing similar was measured or one half of the batch is empty."""
        if not self.rows or min(chunk, decodes, length) < 1:
            return None
        chunk_at, context_at, decodes_at, length_at = self._at
        a, b, c, d = _coordinates(chunk, context, decodes, length)
        away = abs(chunk_at - a) + abs(context_at - b) + abs(decodes_at - c) + abs(length_at - d)
        at = int(away.argmin())
        return self.rows[at] if away[at] <= FAR else None

    def of_batch(
        self, chunks: NDArray[np.integer], contexts: NDArray[np.integer], lengths: NDArray[np.integer]
    ) -> BreakEven | None:
        """Return the row for an iteration: tokens `[C]` and contexts `[C]` of its chunks, which count as one chunk of
        all tokens, and lengths `[D]` of its decodes, which count as D decodes of their mean."""
        tokens = int(chunks.sum())
        if not tokens or not len(lengths):
            return None
        context = float(np.dot(chunks.astype(np.float64), contexts)) / tokens
        return self.nearest(tokens, context, len(lengths), float(lengths.mean()))


def learn(rows: Iterable[Mapping[str, Any]], sms: int) -> list[BreakEven]:
    """Return a table from a sweep's rows (`hybrid_sweep.Row`) for one model: bursts timed in all variants.

    A variant must be the fastest over `NEIGHBOURS` batches. "all" is timed as one launch. "whole" is timed as two
    launches only: its gain over two launches of cut tiles ("cut") is used for one launch."""
    mine = [r for r in rows if r["regime"] == "burst" and r["us"].keys() >= REQUIRED and r["chunk"] and r["decodes"]]
    if not mine:
        return []
    nan = float("nan")
    us = np.array([[r["us"].get(f"pod {variant}", nan) for variant in VARIANTS] for r in mine], np.float64)
    us[:, 0] = [r["us"]["pod all"] * r["us"]["whole"] / r["us"]["cut"] for r in mine]
    gains = np.log(us[:, 1:2] / us)  # compared with "all"
    at = np.array([_coordinates(r["chunk"], r["context"], r["decodes"], r["length"]) for r in mine])
    found = []
    for i, row in enumerate(mine):
        away = np.abs(at - at[i]).sum(1)
        near = np.argsort(away, kind="stable")[:NEIGHBOURS]
        mean = gains[near[away[near] <= NEAR]].mean(0)
        mean = np.where(np.isnan(mean), -np.inf, mean)
        best = 0 if mean[0] > math.log(MARGIN) else 1
        mixed = NUM_SEQUENTIAL + int(mean[NUM_SEQUENTIAL:].argmax())
        if mean[mixed] > mean[best] + math.log(MARGIN):
            best = mixed
        name = VARIANTS[best]
        programs = sms if best < NUM_SEQUENTIAL or name == "together" else int(row["plan"][name])
        found.append(BreakEven(row["chunk"], row["context"], row["decodes"], row["length"], name, programs))
    return found


def file_of(folder: Path, made: TableKey) -> Path:
    """Return the path. The name identifies the GPU, the model's heads and the measured code."""

    def digest(words: Iterable[object]) -> str:
        return hashlib.sha256(repr(tuple(words)).encode()).hexdigest()[:12]

    return folder / f"pod-{digest(made[:6])}-{digest(made[6:])}.json"


def _decoded(content: Any, made: TableKey) -> list[BreakEven]:
    """Raises `ValueError`, `TypeError` or `KeyError`."""
    if content["made"] != made._asdict():
        raise ValueError("the table is for another GPU, model or version")
    rows = [
        BreakEven(float(chunk), float(context), float(decodes), float(length), str(variant), int(programs))
        for chunk, context, decodes, length, variant, programs in content["rows"]
    ]
    if not 0 < len(rows) <= MAX_ROWS:
        raise ValueError(f"the table has {len(rows)} rows")
    for row in rows:
        sizes = row[:4]
        sane = all(map(math.isfinite, sizes)) and row.context >= 0 and min(row.chunk, row.decodes, row.length) >= 1
        if not sane or row.variant not in VARIANTS or not 0 <= row.programs <= made.sms:
            raise ValueError(f"{list(row)} is not a valid row")
    return rows


def read(folder: Path, made: TableKey) -> tuple[BreakEvens | None, str]:
    """Return the valid table of this folder, else the shipped one, else None, with a line for the log."""
    file, rule = file_of(folder, made), "attention in one launch: by rule"
    if not file.exists() and (shipped := file_of(SHIPPED, made)).exists():
        file = shipped
    try:
        table = BreakEvens(_decoded(json.loads(file.read_text(encoding="utf-8")), made))
    except FileNotFoundError:
        stale = any(folder.glob(f"{file.name[: -len('-0123456789ab.json')]}-*.json"))
        why = "break-evens were measured with other kernels" if stale else "no break-evens were measured here"
        return None, f"{rule}; {why} (weft bench attention --sweep paper --keep)"
    except (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        return None, f"{rule}; {file} is not used: {' '.join(why.split())[:200]}"
    return table, f"attention in one launch: by {len(table.rows)} measured batches of {file}"


def write(folder: Path, made: TableKey, rows: Sequence[BreakEven]) -> Path:
    """Replace the file atomically. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, made)
    lines = ",\n".join(json.dumps(list(row)) for row in rows)
    text = f'{{"made": {json.dumps(made._asdict())},\n"rows": [\n{lines}\n]}}\n'
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=file.name, suffix=".part", delete=False) as part:
        try:
            part.write(text)
            part.flush()
            os.replace(part.name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name)
            raise
    return file


def keep(
    rows: Sequence[Mapping[str, Any]], folder: Path, made: Callable[[str], TableKey], say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Write a table for each model in a sweep's rows. Returns False if one cannot be written; `say` gets the reason."""
    done = True
    if not rows:
        say("no break-evens to write: nothing was measured")
        return False
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        of = made(model)
        mine = [row for row in rows if row["model"] == model]
        found = learn(mine, of.sms)
        if not found:
            say(f"{model}: no break-evens to write: no batch was timed in all variants, increase --budget-seconds")
            done = False
            continue
        try:
            file = write(folder, of, found)
        except OSError as error:
            say(f"{model}: break-evens cannot be written to {folder}: {error.strerror or error}")
            done = False
            continue
        counts = ", ".join(f"{sum(row.variant == variant for row in found)} {variant}" for variant in VARIANTS)
        say(f"{model}: break-evens of {len(found)} batches ({counts}) written to {file}")
        apart = [r for r in mine if r["regime"] == "burst" and r["us"].keys() >= REQUIRED]
        ones = [min(us for variant, us in r["us"].items() if variant.startswith("pod ")) for r in apart]
        late = sum(one > 1.01 * min(r["us"]["whole"], r["us"]["cut"]) for one, r in zip(ones, apart, strict=True))
        say(f"{model}: two launches were faster than any single one by more than 1 % in {late} of them")
    return done
