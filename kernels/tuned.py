"""Measured configurations of matrix products: tables shipped with weft, and what this machine found at a start.

A table maps (tokens, features, depth) of a product to a `GemmConfig`; tokens is a bucket, the largest count it serves.
What is found is kept in a file for each kind of machine, so that it is searched for once. No Triton is needed to read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.kernels import experts_config, fp8_config
from weft.kernels.fp8_few_config import is_few
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gpu import gpu
from weft.kernels.source_digest import source_digest

log = logging.getLogger("weft.kernels")

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHIPPED = {((9, 0), 132): "gemm_h200.json"}
"""(compute capability, SMs) -> table. The H100 SXM has both in common with the H200 that it was measured on."""
SOURCES = ("gemm*.py", "projections.py", "dependent_launch.py", "experts*.py", "router.py", "fp8*.py")
"""what a timing depends on"""
CANDIDATES = 4
"""configurations tried for a shape beside the rule's: those that win most often in the shipped tables"""
MIN_ELEMENTS = 1 << 21
"""of a weight that is worth tuning for"""

Key = tuple[int, ...]
"""(bucket, features, depth), for operands in FP8 (bucket, features, depth, 8), for experts (bucket, features, depth,
experts, experts of a token)"""
Table = Mapping[Key, GemmConfig]


class Shape(NamedTuple):
    """A product: `kind` names its epilogue (qkv, residual, gate_up, logits), the weight is `[features, depth]`.

    `experts`: both products of a layer of experts together; the gate-up matrix of each is `[features, depth]`.
    """

    kind: str
    features: int
    depth: int
    experts: int = 0
    top: int = 0
    """experts of a token"""
    bits: int = 16
    """of both operands' numbers; 8: e4m3"""

    @property
    def elements(self) -> int:
        """Numbers in its weights."""
        own = self.features * self.depth
        return self.experts * (own + own // 2) if self.experts else own

    def key(self, bucket: int) -> Key:
        sizes = (bucket, self.features, self.depth)
        if self.experts:
            return (*sizes, self.experts, self.top)
        return sizes if self.bits == 16 else (*sizes, self.bits)


class Machine(NamedTuple):
    """What measured configurations belong to."""

    gpu: str
    capability: tuple[int, int]
    sms: int
    triton: str
    kernels: str
    """digest of their code"""


def machine(device: torch.device | int = 0) -> Machine:
    """Of this process and that device."""
    here = gpu(device)
    assert here is not None
    return Machine(
        here.name, here.capability, here.sms, importlib.import_module("triton").__version__,
        source_digest(*SOURCES),
    )  # fmt: skip


def bucket_of(num_tokens: int) -> int | None:
    """The bucket that serves this many tokens; None: more than any."""
    return next((b for b in BUCKETS if num_tokens <= b), None)


def _encoded(table: Table) -> dict[str, list[int]]:
    return {",".join(map(str, key)): [int(field) for field in config] for key, config in table.items()}


def decoded(rows: Mapping[str, Sequence[int]]) -> dict[Key, GemmConfig]:
    """A table from its JSON form: `"M,N,K"` -> the fields of a `GemmConfig`. Raises `ValueError` or `TypeError`.

    Experts have two more numbers in their key, products in FP8 one.
    """
    table: dict[Key, GemmConfig] = {}
    for key, row in rows.items():
        sizes = tuple(map(int, key.split(",")))
        if len(sizes) not in (3, 4, 5):
            raise ValueError(f"{key} is no shape of a product")
        fields: list[Any] = [int(v) for v in row]
        config = GemmConfig(*fields)
        table[sizes] = config._replace(swap=bool(config.swap), special=bool(config.special))
    return table


@functools.cache
def shipped(capability: tuple[int, int], sms: int) -> Table:
    """The table for GPUs of this architecture and size; empty when there is none."""
    name = SHIPPED.get((capability, sms))
    return decoded(json.loads(Path(__file__).with_name(name).read_text())) if name else {}


def _shipped_here() -> Table:
    here = gpu()
    return {} if here is None else shipped(here.capability, here.sms)


_found: dict[Key, GemmConfig] = {}


def use(table: Table) -> None:
    """From now on `lookup` knows these configurations, beside the shipped ones. Before any graph is captured."""
    _found.update(table)


def lookup(
    num_tokens: int, features: int, depth: int, experts: int = 0, top: int = 0, bits: int = 16
) -> GemmConfig | None:  # fmt: skip
    """The measured configuration for a product (see `Shape`); None: nobody measured it."""
    bucket = bucket_of(num_tokens)
    if bucket is None:
        return None
    key = Shape("", features, depth, experts, top, bits).key(bucket)
    return _shipped_here().get(key) or _found.get(key)


def cache_file(folder: Path, of: Machine) -> Path:
    return folder / f"gemm-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}.json"


def read_cache(folder: Path, of: Machine) -> dict[Key, GemmConfig]:
    """What was found on such a machine before; a file that cannot be read, or is not one, holds nothing."""
    try:
        return decoded(json.loads(cache_file(folder, of).read_text())["table"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_cache(folder: Path, of: Machine, table: Table) -> None:
    """Add `table` to the file, at once or not at all. Raises `OSError`. The caller holds the lock."""
    file = cache_file(folder, of)
    content = {"machine": of._asdict(), "table": _encoded({**read_cache(folder, of), **table})}
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=file.name, suffix=".part", delete=False) as part:
        try:
            json.dump(content, part, indent=1)
            part.flush()
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise


@contextlib.contextmanager
def _only_one(file: Path, patience_s: float) -> Iterator[bool]:
    """Whether this process is the only one here. Another one's end is waited for, `patience_s` at most."""
    give_up = time.monotonic() + patience_s
    with file.open("w") as handle:
        alone = False
        while not alone and time.monotonic() < give_up:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                time.sleep(0.1)
        yield alone  # closing the file gives the lock back


@functools.cache
def candidates(bucket: int, special: bool) -> tuple[GemmConfig, ...]:
    """What wins most often for this many tokens in the shipped tables. special: the GPU has that kernel."""
    wins: Counter[GemmConfig] = Counter()
    for capability, sms in SHIPPED:
        wins.update(
            config
            for key, config in shipped(capability, sms).items()
            if key[0] == bucket and len(key) == 3 and (special or not config.special)
        )
    return tuple(config for config, _ in wins.most_common(CANDIDATES))


def tries(shape: Shape, by_rule: GemmConfig, bucket: int, special: bool) -> tuple[GemmConfig, ...]:
    """What `search` measures for a product."""
    if shape.experts:
        others = experts_config.candidates(bucket, shape.experts, shape.top, hopper=special)
    elif shape.bits == 8:
        few = is_few(by_rule) or not by_rule.special
        others = fp8_config.candidates(shape.kind, bucket, shape.depth, few=few)
    else:
        others = candidates(bucket, special)
    return tuple(dict.fromkeys((by_rule, *others)))


def missing(shapes: Sequence[Shape], max_tokens: int, *known: Table) -> list[tuple[Shape, int]]:
    """Shapes and buckets up to that of `max_tokens` that no table knows, largest buckets first."""
    worth = dict.fromkeys(s for s in shapes if s.elements >= MIN_ELEMENTS)
    top = bucket_of(max_tokens) or BUCKETS[-1]
    return [
        (shape, bucket)
        for bucket in reversed(BUCKETS)
        for shape in worth
        if bucket <= top and not any(shape.key(bucket) in table for table in known)
    ]


def search(
    wanted: Sequence[tuple[Shape, int]],
    measure: Callable[[Shape, int, GemmConfig], float | None],
    rule: Callable[[Shape, int], GemmConfig],
    *,
    special: bool,
    budget_s: float,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Key, GemmConfig]:
    """The fastest of a few candidates and of the rule's choice for each shape and bucket, as far as the budget goes.

    measure: milliseconds of a product, None if this configuration cannot run it. A shape and bucket whose candidates
    could not all be tried is left out, for the next start.
    """
    found: dict[Key, GemmConfig] = {}
    begin, longest = clock(), 0.0
    for done, (shape, bucket) in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        timed: list[tuple[float, GemmConfig]] = []
        for config in tries(shape, rule(shape, bucket), bucket, special):
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
    shapes: Sequence[Shape],
    max_tokens: int,
    of: Machine,
    folder: Path,
    measure: Callable[[Shape, int, GemmConfig], float | None],
    rule: Callable[[Shape, int], GemmConfig],
    *,
    budget_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Key, GemmConfig]:
    """What the cache in `folder` knows for this machine, after a search for what it lacks (see `search`).

    Of several processes that start at once one searches, the others wait and read what it found. Where the folder
    cannot be written nothing is searched, because every start would have to.
    """
    known = read_cache(folder, of)
    ours = shipped(of.capability, of.sms)
    if budget_s <= 0 or not missing(shapes, max_tokens, known, ours):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(cache_file(folder, of).with_suffix(".lock"), 2 * budget_s) as alone:
            known = read_cache(folder, of)
            wanted = missing(shapes, max_tokens, known, ours)
            if alone and wanted:
                special = of.capability[0] == 9
                found = search(wanted, measure, rule, special=special, budget_s=budget_s, progress=progress)
                write_cache(folder, of, found)
                known |= found
    except OSError as error:
        log.warning("matrix products are not tuned for this GPU: %s cannot be written (%s)", folder, error.strerror)
    return known
