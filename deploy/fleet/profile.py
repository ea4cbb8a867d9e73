"""`IterationProfile`: how long an iteration takes, and what it draws, as a function of its batch. A JSON file.

    milliseconds = dense(tokens) + decodes' context x a + query-key pairs of prefill x b + chunks x c + decodes x d

`dense` is piecewise linear over the tokens of the iteration. Every part is zero or more. `weft bench iterations` fits
them to recorded iterations (`tools/fleet/fit.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.engine.plans.document import read_document
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.work import GPU_TILE, Costs

VERSION = 1
SHIPPED = Path(__file__).with_name("profiles")
Floats = npt.NDArray[np.float64]


class Features(NamedTuple):
    """What an iteration's time depends on."""

    tokens: int
    decodes: int
    context: int
    """positions that the decodes see, summed"""
    pairs: int
    """of a prefill token and a position it sees"""
    chunks: int
    """of prefill"""

    @classmethod
    def of(cls, batch: Batch) -> Features:
        d = batch.num_decodes
        tokens, ends = batch.query_len[d:].astype(np.int64), batch.kv_len[d:].astype(np.int64)
        pairs = int((tokens * ends - tokens * (tokens - 1) // 2).sum())
        return cls(batch.num_tokens, d, int(batch.kv_len[:d].sum(dtype=np.int64)), pairs, len(tokens))


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that was recorded; a simulation starts from it."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Energy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Joules beyond those at rest."""

    idle_watts: float
    per_iteration: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0
    """of a position that a decode sees"""
    per_pair: float = 0.0


class SideBySide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines that share a machine's cores: how many times as long things take, by the number of engines that compute,
    from one."""

    cores: int
    decodes: tuple[float, ...]
    """an iteration without prompts, and what follows from it"""
    prompts: tuple[float, ...]
    """the way to a first token"""
    decodes_spread: tuple[tuple[float, ...], ...] = ()
    """by the same number: how many times the mean single ones take, as means of equal shares, ascending"""
    prompts_spread: tuple[tuple[float, ...], ...] = ()


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the fit over what was recorded: |fitted - recorded| / recorded, per iteration, and of all their sum."""

    iterations: int
    median: float
    p90: float
    total: float
    """(sum fitted - sum recorded) / sum recorded"""


class IterationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["weft-iterations"] = "weft-iterations"
    version: int = VERSION
    model: str
    device: str
    made: str
    """from what, with which versions, when"""
    limits: Limits
    knots: tuple[float, ...]
    """tokens of an iteration, ascending"""
    dense_ms: tuple[float, ...]
    """at each of them; beyond the last one in proportion"""
    context_ms: float
    """a position that a decode sees"""
    pair_ms: float
    chunk_ms: float
    decode_ms: float
    """a decode, beside its share of `dense_ms`"""
    gap_ms: float = 0.0
    """between two iterations, the second of which is there already"""
    host_ms: float = 0.0
    """scheduling, building and committing an iteration, beside the one that computes"""
    host_request_ms: float = 0.0
    """the same, for each of its requests"""
    request_ms: float = 0.0
    """from a client's first byte to the engine: HTTP, text, routing, the socket"""
    answer_ms: float = 0.0
    """from the engine to a client"""
    silent: tuple[int, ...] = ()
    """tokens of an answer before its first that is text, such as parts of a letter: those of answers that were seen"""
    threads: int = 0
    """cores that an iteration keeps busy; 0: it runs on a device of its own"""
    side_by_side: SideBySide | None = None
    energy: Energy | None = None
    error: Error | None = None

    def seconds(self, f: Features) -> float:
        ms = float(np.interp(f.tokens, self.knots, self.dense_ms))
        if f.tokens > self.knots[-1]:
            ms *= f.tokens / self.knots[-1]
        ms += (
            self.context_ms * f.context + self.pair_ms * f.pairs + self.chunk_ms * f.chunks + self.decode_ms * f.decodes
        )
        return ms / 1e3

    @property
    def costs(self) -> Costs:
        """What an engine believes of its parts before it has measured any."""
        slope = (self.dense_ms[-1] - self.dense_ms[0]) / max(1.0, self.knots[-1] - self.knots[0])
        tile = 1 if self.threads else GPU_TILE
        return Costs(self.dense_ms[0], max(slope, 1e-6), self.context_ms, self.pair_ms, {None: 1}, tile)

    def joules(self, f: Features) -> float:
        """Beyond those at rest; 0 where nothing is known."""
        e = self.energy
        if e is None:
            return 0.0
        return e.per_iteration + e.per_token * f.tokens + e.per_context * f.context + e.per_pair * f.pairs

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load_profile(name: str) -> IterationProfile:
    """A file, or a shipped one by its name. Raises `ConfigError`, one line."""
    path = expanded(name)
    if not path.exists():
        path = SHIPPED / f"{name}.json"
        if not path.exists():
            shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
            raise ConfigError(f"--profile {name}: there is no such file; shipped are {shipped}")
    profile = read_document(
        path, IterationProfile, form="weft-iterations", version=VERSION, kind="profile of iterations",
        made_by="weft bench iterations records them",
    )  # fmt: skip
    if len(profile.knots) != len(profile.dense_ms) or not profile.knots or list(profile.knots) != sorted(profile.knots):
        raise ConfigError(f"{path}: knots and dense_ms must be as many, and knots ascend")
    if min(profile.dense_ms) <= 0 or min(profile.context_ms, profile.pair_ms, profile.chunk_ms, profile.decode_ms) < 0:
        raise ConfigError(f"{path} has a time that is not positive")
    beside = profile.side_by_side
    if beside is not None:
        for name in ("decodes", "prompts"):
            known, spread = getattr(beside, name), getattr(beside, f"{name}_spread")
            if not known or (spread and (len(spread) != len(known) or not all(spread))):
                raise ConfigError(f"{path}: side_by_side.{name} and its spread must be as many, and neither empty")
    return profile
