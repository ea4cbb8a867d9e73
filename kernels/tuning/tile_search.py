"""Finds GEMM tile configurations by measurement at start-up, within a time budget, and keeps them in a cache file."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft.kernels.experts import experts_config
from weft.kernels.matmul import fp8_config
from weft.kernels.matmul.fp8_few_config import is_few
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.tuned import (
    BUCKETS,
    MIN_ELEMENTS,
    SHIPPED,
    Key,
    Machine,
    Shape,
    Table,
    bucket_of,
    cache_file,
    read_cache,
    shipped,
    write_cache,
)

log = logging.getLogger("weft.kernels")

CANDIDATES = 4
"""Configurations tried for each shape besides the rule's choice: the most frequent winners of the shipped tables."""


@contextlib.contextmanager
def _exclusive(file: Path, patience_s: float) -> Iterator[bool]:
    """Yield whether this process has the lock. Waits up to `patience_s` for another process."""
    give_up = time.monotonic() + patience_s
    with file.open("w") as handle:
        alone = False
        while not alone and time.monotonic() < give_up:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                time.sleep(0.1)
        yield alone  # closing the file releases the lock


@functools.cache
def candidates(bucket: int, special: bool) -> tuple[GemmConfig, ...]:
    """Return the most frequent winners of the shipped tables for this many tokens. special: the GPU has that kernel."""
    wins: Counter[GemmConfig] = Counter()
    for capability, sms in SHIPPED:
        wins.update(
            config
            for key, config in shipped(capability, sms).items()
            if key[0] == bucket and len(key) == 3 and (special or not config.special)
        )
    return tuple(config for config, _ in wins.most_common(CANDIDATES))


def configs_to_try(shape: Shape, by_rule: GemmConfig, bucket: int, special: bool) -> tuple[GemmConfig, ...]:
    """Return the configurations that `search` measures for a GEMM."""
    if shape.experts:
        others = experts_config.candidates(bucket, shape.experts, shape.top, hopper=special)
    elif shape.bits == 8:
        few = is_few(by_rule) or not by_rule.special
        others = fp8_config.candidates(shape.kind, bucket, shape.depth, few=few)
    else:
        others = candidates(bucket, special)
    return tuple(dict.fromkeys((by_rule, *others)))


def missing(shapes: Sequence[Shape], max_tokens: int, *known: Table) -> list[tuple[Shape, int]]:
    """Return shapes and buckets up to that of `max_tokens` that are in no table, largest buckets first."""
    worth = dict.fromkeys(s for s in shapes if s.elements >= MIN_ELEMENTS)
    top = bucket_of(max_tokens) or BUCKETS[-1]
    return [
        (shape, bucket)
        for bucket in reversed(BUCKETS)
        for shape in worth
        if bucket <= top and not any(shape.key(bucket) in table for table in known)
    ]


def search(
    wanted: Sequence[tuple[Shape, int]], measure: Callable[[Shape, int, GemmConfig], float | None],
    rule: Callable[[Shape, int], GemmConfig], *, special: bool, budget_s: float,
    progress: Callable[[int, int], None] | None = None, clock: Callable[[], float] = time.monotonic,
) -> dict[Key, GemmConfig]:  # fmt: skip
    """Return the fastest of a few candidates and the rule's choice for each shape and bucket within the time budget.

    measure: milliseconds of a GEMM, None if this configuration cannot run it. A shape and bucket with untried
    candidates is left out, for the next start."""
    found: dict[Key, GemmConfig] = {}
    begin, longest = clock(), 0.0
    for done, (shape, bucket) in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        timed: list[tuple[float, GemmConfig]] = []
        for config in configs_to_try(shape, rule(shape, bucket), bucket, special):
            at = clock()
            if at - begin + longest > budget_s:
                return found
            if (ms := measure(shape, bucket, config)) is not None:
                timed.append((ms, config))
            longest = max(longest, clock() - at)
        if timed:
            found[shape.key(bucket)] = min(timed, key=lambda row: row[0])[1]
    if progress is not None:
        progress(len(wanted), len(wanted))
    return found


def find(
    shapes: Sequence[Shape], max_tokens: int, of: Machine, folder: Path,
    measure: Callable[[Shape, int, GemmConfig], float | None], rule: Callable[[Shape, int], GemmConfig], *,
    budget_s: float, progress: Callable[[int, int], None] | None = None,
) -> dict[Key, GemmConfig]:  # fmt: skip
    """Return this machine's configurations from the cache in `folder`, after a search for missing ones (see `search`).

    If several processes start at once, one searches and the others wait and read its results. If the folder cannot be
    written, nothing is searched, because every start would repeat it."""
    known = read_cache(folder, of)
    ours = shipped(of.capability, of.sms)
    if budget_s <= 0 or not missing(shapes, max_tokens, known, ours):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache_file(folder, of).with_suffix(".lock"), 2 * budget_s) as alone:
            known = read_cache(folder, of)
            wanted = missing(shapes, max_tokens, known, ours)
            if alone and wanted:
                special = of.capability[0] == 9
                found = search(wanted, measure, rule, special=special, budget_s=budget_s, progress=progress)
                write_cache(folder, of, found)
                known |= found
    except OSError as error:
        log.warning("GEMMs are not tuned for this GPU: %s cannot be written (%s)", folder, error.strerror)
    return known
