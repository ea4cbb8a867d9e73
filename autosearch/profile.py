"""`Profile`: times and watts of every operation, alone and in pairs, on one GPU for one model. Stored as JSON.

The unit of a point's `work` depends on the operation: tokens (GEMMs, collectives), KV tokens (decode attention) or
query-key pairs (prefill attention). A profile of several ranks describes one rank, with the collectives of all
`transformations`. `Curves` interpolates the time per unit of work. For GEMMs the unit is a wave of tiles over the SMs,
which preserves the steps of wave quantization.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from weft.autosearch.bench_protocol import Load
from weft.engine.config import cache_home
from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import Operation, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.document import read_document
from weft.engine.plans.plan import Target
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig

VERSION = 1
MEMORY_SHARE = 0.9
KV_DTYPE = torch.bfloat16  # Any dtype of two bytes, for weights and pages.
SHIPPED = Path(__file__).with_name("profiles")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sustained measurement of one operation alone on `sms` SMs."""

    operation: str
    work: float
    sms: int
    ms: float
    watts: float
    mhz: float
    config: GemmConfig | None = None


class PairPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compute operation next to a memory or network operation, both busy all the time."""

    compute: str
    guest: str
    compute_work: float
    guest_work: float
    compute_sms: int
    guest_sms: int
    compute_ms: float
    guest_ms: float
    watts: float


class GuestPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A memory operation next to a collective. The fields are in the order of `PairPoint`."""

    memory: str
    network: str
    memory_work: float
    network_work: float
    memory_sms: int
    network_sms: int
    memory_ms: float
    network_ms: float
    watts: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements, or formulas instead of them. A profile is reused for the same `target`."""

    target: Target
    load: Load
    features: dict[str, int]  # Operation -> rows of its weight; 0 if it has none.
    points: tuple[Point, ...]
    pairs: tuple[PairPoint, ...] = ()
    memory: int = 0  # Bytes of device memory; 0: unknown.
    configs: dict[str, GemmConfig] = {}
    """Operation -> kernel configuration of its nano-operations. In the serial plan the kernel chooses."""
    version: int = VERSION
    format: Literal["weft-profile"] = "weft-profile"
    made: str = ""  # Date and versions, for information.
    guest_pairs: tuple[GuestPair, ...] = ()
    modelled: tuple[str, ...] = ()
    """Operations whose points and pairs come from formulas (`formula_profile.py`), not measurements."""

    def kv_capacity(self, spec: ModelSpec) -> int | None:
        return kv_capacity(self.memory, spec)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self).replace(b'},{"', b'},\n{"') + b"\n")  # one line per measurement
        temporary.replace(path)


def kv_capacity(memory: int, spec: ModelSpec) -> int | None:
    """KV tokens that fit next to the weights at the engine's default share of `memory` bytes; None if 0 bytes."""
    if not memory:
        return None
    free = MEMORY_SHARE * memory - spec.num_parameters * KV_DTYPE.itemsize
    return max(1, int(free / KvLayout.of(spec, 1, KV_DTYPE).token_bytes))


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises `ConfigError`."""
    profile = read_document(
        path, Profile, form="weft-profile", version=VERSION, kind="profile", made_by="weft search records them"
    )  # fmt: skip
    missing = sorted(set(profile.features) - {p.operation for p in profile.points})
    if missing:
        raise ConfigError(f"the profile {path} has no point of {', '.join(missing)}: record it again")
    if any(p.ms <= 0 or p.work <= 0 or p.sms < 1 for p in profile.points):
        raise ConfigError(f"the profile {path} has a time, work or SM count that is not positive: record it again")
    return profile


def cache_folder() -> Path:
    return cache_home() / "profiles"


def cache_path(target: Target) -> Path:
    """Cache file of the profile for this GPU, model and kernels."""
    parts = (target.gpu, target.model, target.dtype, target.kernels)
    return cache_folder() / (re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-").lower() + ".json")


def recorded_profiles() -> Iterator[tuple[Path, Profile]]:
    """Yield every readable profile in the cache, then the shipped ones."""
    for folder in (cache_folder(), SHIPPED):
        for path in sorted(folder.glob("*.json")):
            try:
                yield path, load_profile(path)
            except ConfigError:
                continue  # a file of another version


def work_of(operation: Operation, load: Load) -> float:
    """Work of one operation on a nano-batch of this load."""
    match operation.role:
        case Role.DECODE_ATTENTION:
            return float(load.kv_tokens)
        case Role.PREFILL_ATTENTION:
            return load.prefill_tokens * max(1, load.prompt) / 2
        case _:
            return float(load.tokens)


class Curves:
    """Time and energy of an operation at any work and SM count, interpolated between a profile's points."""

    def __init__(self, profile: Profile) -> None:
        self.num_sms = profile.target.sms
        self._features = profile.features
        self._tile = {name: profile.configs.get(name, SPECIAL) for name in profile.features}
        levels: dict[tuple[str, bool], dict[int, list[Point]]] = {}
        for point in profile.points:
            for serial in (True, False):
                levels.setdefault((point.operation, serial), {}).setdefault(point.sms, []).append(point)
        self._levels: dict[tuple[str, bool], list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]] = {}
        for (name, serial), by_sms in levels.items():
            config = None if serial else profile.configs.get(name)
            self._levels[name, serial] = [
                (sms, *self._level(name, _chosen(points, config))) for sms, points in sorted(by_sms.items())
            ]

    def ms(self, operation: str, work: float, sms: int, *, serial: bool = False) -> float:
        """Milliseconds alone on `sms` SMs. serial: with the kernel's default configuration."""
        if work <= 0:
            return 0.0
        return self._units(operation, work, sms) / self._interpolated(operation, work, sms, serial, 0)

    def joules(self, operation: str, work: float, sms: int, *, serial: bool = False) -> float:
        if work <= 0:
            return 0.0
        watts = self._interpolated(operation, work, sms, serial, 1)
        return watts * self.ms(operation, work, sms, serial=serial) / 1e3

    def _units(self, operation: str, work: float, sms: int) -> float:
        features = self._features[operation]
        if not features:
            return work
        tile = self._tile[operation]
        tiles = -(-int(work) // tile.tokens) * -(-features // tile.features)
        return float(-(-tiles // sms))

    def _level(self, operation: str, points: list[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        points = sorted(points, key=lambda p: p.work)
        speed = [self._units(operation, p.work, p.sms) / p.ms for p in points]
        return np.array([p.work for p in points]), np.array(speed), np.array([p.watts for p in points])

    def _interpolated(self, operation: str, work: float, sms: int, serial: bool, what: int) -> float:
        """Units of work per ms (what=0) or watts (what=1): linear in 1/speed over work, and in speed over SMs."""
        levels = self._levels[operation, serial]

        def at(level: tuple[int, np.ndarray, np.ndarray, np.ndarray]) -> float:
            _, works, speed, watts = level
            if what:
                return float(np.interp(work, works, watts))
            return float(1 / np.interp(work, works, 1 / speed))

        counts = [level[0] for level in levels]
        if sms <= counts[0]:
            # attention slows down with its SMs; the unit of GEMMs already accounts for them
            shrink = 1.0 if what or self._features[operation] else sms / counts[0]
            return at(levels[0]) * shrink
        if sms >= counts[-1]:
            return at(levels[-1])
        i = int(np.searchsorted(counts, sms))
        low, high = levels[i - 1], levels[i]
        share = (sms - low[0]) / (high[0] - low[0])
        return at(low) * (1 - share) + at(high) * share


def _chosen(points: list[Point], config: GemmConfig | None) -> list[Point]:
    """Choose one point per amount of work: the one of `config` if it was measured, else the fastest."""
    best: dict[float, Point] = {}
    for point in points:
        before = best.get(point.work)
        if before is None or (point.config == config, -point.ms) > (before.config == config, -before.ms):
            best[point.work] = point
    return list(best.values())


def today() -> str:
    """Date and versions, to identify a file."""
    names = []
    for name in ("torch", "triton"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([datetime.now(UTC).strftime("%Y-%m-%d"), *names])
