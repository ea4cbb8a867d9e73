"""Measured configurations of GEMMs: tables shipped with weft, and results of this machine's start-up search.

A table maps (tokens, features, depth) of a GEMM to a `GemmConfig`; tokens is a bucket, the largest count it serves.
Search results are cached in a file per kind of machine. Reading needs no Triton.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.kernels.common.gpu import gpu
from weft.kernels.common.source_digest import source_digest
from weft.kernels.matmul.gemm_config import GemmConfig

log = logging.getLogger("weft.kernels")

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHIPPED = {((9, 0), 132): "gemm_h200.json"}
"""(compute capability, SMs) -> table. The H100 SXM shares both with the H200 of the measurements."""
SOURCES = (
    "common/dependent_launch", "common/hopper", "experts/experts", "experts/experts_config", "experts/experts_hopper",
    "experts/experts_triton", "experts/fp8_experts", "experts/fp8_experts_hopper", "experts/fp8_experts_triton",
    "experts/router", "formats/fp8", "formats/fp8_gluon", "formats/fp8_matrix", "formats/fp8_triton",
    "matmul/fp8_config", "matmul/fp8_few_config", "matmul/fp8_few_hopper", "matmul/fp8_hopper",
    "matmul/fp8_projections", "matmul/fp8_triton", "matmul/gemm", "matmul/gemm_activations", "matmul/gemm_config",
    "matmul/gemm_hopper", "matmul/gemm_launch", "matmul/gemm_tiles", "matmul/gemm_triton", "matmul/projections",
)  # fmt: skip
"""The modules of `kernels` that a GEMM's timing depends on."""
MIN_ELEMENTS = 1 << 21  # Smallest weight that is worth tuning.

Key = tuple[int, ...]  # (bucket, features, depth); FP8: (..., 8); experts: (..., experts, experts per token).
Table = Mapping[Key, GemmConfig]


class Shape(NamedTuple):
    """A GEMM: `kind` names its epilogue (qkv, residual, gate_up, logits), the weight is `[features, depth]`.

    `experts`: both GEMMs of an expert layer together; each expert's gate-up matrix is `[features, depth]`.
    """

    kind: str
    features: int
    depth: int
    experts: int = 0
    top: int = 0  # Experts per token.
    bits: int = 16  # Bits of both operands' numbers; 8: e4m3.

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
    """Identifies what configurations were measured on."""

    gpu: str
    capability: tuple[int, int]
    sms: int
    triton: str
    kernels: str  # Digest of the kernels' code.


def machine(device: torch.device | int = 0) -> Machine:
    """Return the identity for this process and that device."""
    here = gpu(device)
    assert here is not None
    return Machine(
        here.name, here.capability, here.sms, importlib.import_module("triton").__version__,
        source_digest(*SOURCES),
    )  # fmt: skip


def bucket_of(num_tokens: int) -> int | None:
    """Return the bucket that serves this many tokens, or None if there are too many."""
    return next((b for b in BUCKETS if num_tokens <= b), None)


def _encoded(table: Table) -> dict[str, list[int]]:
    return {",".join(map(str, key)): [int(field) for field in config] for key, config in table.items()}


def decoded(rows: Mapping[str, Sequence[int]]) -> dict[Key, GemmConfig]:
    """Return a table from its JSON form: `"M,N,K"` -> fields of a `GemmConfig`. Raises `ValueError` or `TypeError`.

    Experts have two more numbers in their key, FP8 GEMMs one."""
    table: dict[Key, GemmConfig] = {}
    for key, row in rows.items():
        sizes = tuple(map(int, key.split(",")))
        if len(sizes) not in (3, 4, 5):
            raise ValueError(f"{key} is not a GEMM shape")
        fields: list[Any] = [int(v) for v in row]
        config = GemmConfig(*fields)
        table[sizes] = config._replace(swap=bool(config.swap), special=bool(config.special))
    return table


@functools.cache
def shipped(capability: tuple[int, int], sms: int) -> Table:
    """Return the table for GPUs of this architecture and size; empty if there is none."""
    name = SHIPPED.get((capability, sms))
    return decoded(json.loads(Path(__file__).with_name(name).read_text())) if name else {}


def _shipped_here() -> Table:
    here = gpu()
    return {} if here is None else shipped(here.capability, here.sms)


_found: dict[Key, GemmConfig] = {}


def use(table: Table) -> None:
    """Add these to the shipped configurations for `lookup`. Call it before any graph is captured."""
    _found.update(table)


def lookup(
    num_tokens: int, features: int, depth: int, experts: int = 0, top: int = 0, bits: int = 16,
) -> GemmConfig | None:  # fmt: skip
    """Return the measured configuration of a GEMM (see `Shape`), or None if it was not measured."""
    bucket = bucket_of(num_tokens)
    if bucket is None:
        return None
    key = Shape("", features, depth, experts, top, bits).key(bucket)
    return _shipped_here().get(key) or _found.get(key)


def cache_file(folder: Path, of: Machine) -> Path:
    return folder / f"gemm-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}.json"


def read_cache(folder: Path, of: Machine) -> dict[Key, GemmConfig]:
    """Return earlier results for this machine; empty if the file is missing or invalid."""
    try:
        return decoded(json.loads(cache_file(folder, of).read_text())["table"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_cache(folder: Path, of: Machine, table: Table) -> None:
    """Add `table` to the file atomically. Raises `OSError`. The caller holds the lock."""
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
