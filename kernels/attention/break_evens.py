"""`BreakEvens`: the way of attending to a hybrid batch that was measured to be the quickest, by the batch's sizes.

Made of the rows of `weft bench attention --keep`, kept in a file for each GPU, heads, page size and version of the
kernels (or shipped beside this one: none is yet), read by an engine with `--pod auto`. A batch takes the way of the
nearest row; far from all rows the rule of `work_lists.one_launch` decides, as it does without a file. Reading one
needs no Triton.
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
WAYS = ("whole", "all", "few", "half", "share", "tiles", "together")
"""of one launch. All programs begin with decodes, so that both lists are done in turn: "whole" with tiles whole, "all"
with tiles cut along their keys. Or some begin with decodes and the others with tiles that are cut: `FIRST_DECODERS` of
them, half of them, as many as decodes' share of the work. Or decodes are tiles of one query in the chunks' list; or
every program does both lists at the same time ("together")"""
IN_TURN = 2
"""of `WAYS`: so many do both lists in turn"""
NEEDED = {"whole", "cut", "pod all", "pod few", "pod half"}
"""timings without which a batch of the sweep tells nothing; those of other ways may be missing"""
MARGIN = 1.02
"""a row leaves "all" for another way that is so much quicker, and does not mix for less"""
NEIGHBOURS = 4
"""batches that a row's way is chosen by, itself among them: a single timing may be an accident"""
NEAR = 1.0
"""how far neighbours may be: the sum over the sizes of |log2|"""
FAR = 2.0
"""a batch that is farther from every row was not measured"""
MAX_ROWS = 20_000
SHIPPED = Path(__file__).parent
"""where tables may lie that come with this version: under the names that `write` gives them"""


class Made(NamedTuple):
    """What a table belongs to."""

    gpu: str
    sms: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    triton: str
    kernels: str
    """digest of their code"""

    @classmethod
    def here(cls, heads: int, kv_heads: int, head_dim: int, page_size: int) -> Made:
        """Of this process, its GPU and this version's kernels."""
        found = gpu()
        assert found is not None
        triton = importlib.import_module("triton").__version__
        return cls(found.name, found.sms, heads, kv_heads, head_dim, page_size, triton, source_digest(*SOURCES))


class Even(NamedTuple):
    """A row of the table: tokens of the chunk and of its context, decodes and tokens of each, the way, and how many
    programs begin with decodes."""

    chunk: float
    context: float
    decodes: float
    length: float
    way: str
    programs: int

    @property
    def cuts(self) -> bool:
        """Whether tiles may be cut along their keys."""
        return self.way != "whole"


def _place(chunk: float, context: float, decodes: float, length: float) -> tuple[float, ...]:
    """The chunk counts as part of its context: its last tile reads both."""
    return math.log2(chunk), math.log2(context + chunk), math.log2(decodes), math.log2(length)


class BreakEvens:
    """A table that answers in microseconds."""

    def __init__(self, rows: Sequence[Even]) -> None:
        self.rows = tuple(rows)
        self._at = np.array([_place(*row[:4]) for row in self.rows], np.float64).reshape(-1, 4).T.copy()

    def nearest(self, chunk: float, context: float, decodes: float, length: float) -> Even | None:
        """The row for a batch; None where nothing like it was measured, or one half of it is empty."""
        if not self.rows or min(chunk, decodes, length) < 1:
            return None
        chunk_at, context_at, decodes_at, length_at = self._at
        a, b, c, d = _place(chunk, context, decodes, length)
        away = abs(chunk_at - a) + abs(context_at - b) + abs(decodes_at - c) + abs(length_at - d)
        at = int(away.argmin())
        return self.rows[at] if away[at] <= FAR else None

    def of_batch(
        self, chunks: NDArray[np.integer], contexts: NDArray[np.integer], lengths: NDArray[np.integer]
    ) -> Even | None:
        """The same for an iteration: tokens `[C]` and contexts `[C]` of its chunks, which count as one of all their
        tokens, and lengths `[D]` of its decodes, which count as so many of their mean."""
        tokens = int(chunks.sum())
        if not tokens or not len(lengths):
            return None
        context = float(np.dot(chunks.astype(np.float64), contexts)) / tokens
        return self.nearest(tokens, context, len(lengths), float(lengths.mean()))


def learn(rows: Iterable[Mapping[str, Any]], sms: int) -> list[Even]:
    """A table of the rows of a sweep (`hybrid_sweep.Row`) over one model: bursts that were timed in all ways.

    A way must win over `NEIGHBOURS` batches together. Both lists in turn are one launch as well ("all"); of whole tiles
    only two launches are timed ("whole"), so what they gain over two launches of cut ones ("cut") is taken for one.
    """
    mine = [r for r in rows if r["regime"] == "burst" and r["us"].keys() >= NEEDED and r["chunk"] and r["decodes"]]
    if not mine:
        return []
    nan = float("nan")
    us = np.array([[r["us"].get(f"pod {way}", nan) for way in WAYS] for r in mine], np.float64)
    us[:, 0] = [r["us"]["pod all"] * r["us"]["whole"] / r["us"]["cut"] for r in mine]
    gains = np.log(us[:, 1:2] / us)  # over "all"
    at = np.array([_place(r["chunk"], r["context"], r["decodes"], r["length"]) for r in mine])
    found = []
    for i, row in enumerate(mine):
        away = np.abs(at - at[i]).sum(1)
        near = np.argsort(away, kind="stable")[:NEIGHBOURS]
        mean = gains[near[away[near] <= NEAR]].mean(0)
        mean = np.where(np.isnan(mean), -np.inf, mean)
        way = 0 if mean[0] > math.log(MARGIN) else 1
        mixed = IN_TURN + int(mean[IN_TURN:].argmax())
        if mean[mixed] > mean[way] + math.log(MARGIN):
            way = mixed
        programs = sms if way < IN_TURN or WAYS[way] == "together" else int(row["plan"][WAYS[way]])
        found.append(Even(row["chunk"], row["context"], row["decodes"], row["length"], WAYS[way], programs))
    return found


def file_of(folder: Path, made: Made) -> Path:
    """Its name says what it is for, and with which code it was measured."""

    def digest(words: Iterable[object]) -> str:
        return hashlib.sha256(repr(tuple(words)).encode()).hexdigest()[:12]

    return folder / f"pod-{digest(made[:6])}-{digest(made[6:])}.json"


def _decoded(content: Any, made: Made) -> list[Even]:
    """Raises `ValueError`, `TypeError` or `KeyError`."""
    if content["made"] != made._asdict():
        raise ValueError("it belongs to another GPU, model or version")
    rows = [
        Even(float(chunk), float(context), float(decodes), float(length), str(way), int(programs))
        for chunk, context, decodes, length, way, programs in content["rows"]
    ]
    if not 0 < len(rows) <= MAX_ROWS:
        raise ValueError(f"it has {len(rows)} rows")
    for row in rows:
        sizes = row[:4]
        sane = all(map(math.isfinite, sizes)) and row.context >= 0 and min(row.chunk, row.decodes, row.length) >= 1
        if not sane or row.way not in WAYS or not 0 <= row.programs <= made.sms:
            raise ValueError(f"{list(row)} is no row")
    return rows


def read(folder: Path, made: Made) -> tuple[BreakEvens | None, str]:
    """The table in this folder, else the one that is shipped, and a line for the log; None where there is none that can
    be trusted."""
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


def write(folder: Path, made: Made, rows: Sequence[Even]) -> Path:
    """In place of what was there, at once or not at all. Raises `OSError`."""
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
    rows: Sequence[Mapping[str, Any]], folder: Path, made: Callable[[str], Made], say: Callable[[str], None]
) -> bool:  # fmt: skip
    """Write a table of each model in a sweep's rows. False: something could not be kept, `say` got the reason."""
    done = True
    if not rows:
        say("no break-evens to keep: nothing was measured")
        return False
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        of = made(model)
        mine = [row for row in rows if row["model"] == model]
        found = learn(mine, of.sms)
        if not found:
            say(f"{model}: no break-evens to keep: no batch was timed in all ways, give it more --budget-seconds")
            done = False
            continue
        try:
            file = write(folder, of, found)
        except OSError as error:
            say(f"{model}: break-evens cannot be kept in {folder}: {error.strerror or error}")
            done = False
            continue
        counts = ", ".join(f"{sum(row.way == way for row in found)} {way}" for way in WAYS)
        say(f"{model}: break-evens of {len(found)} batches ({counts}) are kept in {file}")
        apart = [r for r in mine if r["regime"] == "burst" and r["us"].keys() >= NEEDED]
        ones = [min(us for way, us in r["us"].items() if way.startswith("pod ")) for r in apart]
        late = sum(one > 1.01 * min(r["us"]["whole"], r["us"]["cut"]) for one, r in zip(ones, apart, strict=True))
        say(f"{model}: two launches were quicker than any one by more than 1 % in {late} of them")
    return done
