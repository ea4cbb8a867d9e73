"""Defines `IterationProfile`, a JSON file with the time and energy of an iteration as a function of its batch.

    milliseconds = dense(tokens) + decodes' context x a + query-key pairs of prefill x b + chunks x c + decodes x d

`dense` is piecewise linear over the iteration's tokens. Every term is zero or more. `weft bench iterations` fits the
terms to recorded iterations (`tools/fleet/fit.py`).
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
from weft.engine.runner.iteration.cost_shares import GPU_TILE, Costs

VERSION = 1
SHIPPED = Path(__file__).with_name("profiles")
Floats = npt.NDArray[np.float64]


class Features(NamedTuple):
    """Properties of a batch that determine an iteration's time."""

    tokens: int
    decodes: int
    context: int  # Sum of the positions that decodes attend to.
    pairs: int  # Pairs of a prefill token and a position it attends to.
    chunks: int  # Prefill chunks.

    @classmethod
    def of(cls, batch: Batch) -> Features:
        d = batch.num_decodes
        tokens, ends = batch.query_len[d:].astype(np.int64), batch.kv_len[d:].astype(np.int64)
        pairs = int((tokens * ends - tokens * (tokens - 1) // 2).sum())
        return cls(batch.num_tokens, d, int(batch.kv_len[:d].sum(dtype=np.int64)), pairs, len(tokens))


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the recorded engine, the defaults of a simulation."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    state_pages: int = 0  # Pages of a request's recurrent states.
    chunk_step: int = 1  # Tokens at whose multiples prompts are cut.


class Energy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Joules beyond idle power."""

    idle_watts: float
    per_iteration: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0  # Joules per position that a decode attends to.
    per_pair: float = 0.0


class SideBySide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slowdowns of engines that share a machine's cores, for 1, 2, … computing engines."""

    cores: int
    decodes: tuple[float, ...]  # Slowdown of an iteration without prompts, and of its outputs.
    prompts: tuple[float, ...]  # Slowdown of everything up to a first token.
    decodes_spread: tuple[tuple[float, ...], ...] = ()
    """For the same numbers, factors relative to the mean of equally large groups of iterations, ascending."""
    prompts_spread: tuple[tuple[float, ...], ...] = ()


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of the fit: |fitted - recorded| / recorded per iteration, and of the sum."""

    iterations: int
    median: float
    p90: float
    total: float  # (sum fitted - sum recorded) / sum recorded


class IterationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["weft-iterations"] = "weft-iterations"
    version: int = VERSION
    model: str
    device: str
    made: str  # Source, versions and date.
    limits: Limits
    knots: tuple[float, ...]  # Tokens of an iteration, ascending.
    dense_ms: tuple[float, ...]  # Time at each knot; proportional to tokens beyond the last one.
    context_ms: float  # Time per position that a decode attends to.
    pair_ms: float
    chunk_ms: float
    decode_ms: float  # Time per decode, in addition to its share of `dense_ms`.
    gap_ms: float = 0.0  # Gap between two iterations if the second is already queued.
    host_ms: float = 0.0  # Host time to schedule, build and commit an iteration while another one computes.
    host_request_ms: float = 0.0  # Additional host time per request.
    request_ms: float = 0.0  # Time from a client's first byte to the engine: HTTP, text, routing, the socket.
    answer_ms: float = 0.0  # Time from the engine to a client.
    silent: tuple[int, ...] = ()
    """Observed numbers of tokens before an answer's first text, for example partial characters."""
    threads: int = 0  # Cores that an iteration keeps busy; 0: it runs on a separate device.
    side_by_side: SideBySide | None = None
    energy: Energy | None = None
    error: Error | None = None

    def seconds(self, f: Features) -> float:
        dense = float(np.interp(f.tokens, self.knots, self.dense_ms)) * max(1.0, f.tokens / self.knots[-1])
        attention = self.context_ms * f.context + self.pair_ms * f.pairs
        return (dense + (attention + self.chunk_ms * f.chunks + self.decode_ms * f.decodes)) / 1e3

    @property
    def costs(self) -> Costs:
        """Costs that an engine assumes before it has measured any."""
        slope = (self.dense_ms[-1] - self.dense_ms[0]) / max(1.0, self.knots[-1] - self.knots[0])
        tile = 1 if self.threads else GPU_TILE
        return Costs(self.dense_ms[0], max(slope, 1e-6), self.context_ms, self.pair_ms, {None: 1}, tile)

    def joules(self, f: Features) -> float:
        """Return joules beyond idle power; 0 without energy data."""
        e = self.energy
        if e is None:
            return 0.0
        return e.per_iteration + e.per_token * f.tokens + e.per_context * f.context + e.per_pair * f.pairs

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load_profile(name: str) -> IterationProfile:
    """Load a file, or a shipped profile by name. Raises `ConfigError`."""
    path = expanded(name)
    if not path.exists():
        path = SHIPPED / f"{name}.json"
        if not path.exists():
            shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
            raise ConfigError(f"--profile {name}: no such file; shipped profiles: {shipped}")
    profile = read_document(
        path, IterationProfile, form="weft-iterations", version=VERSION, kind="profile of iterations",
        made_by="weft bench iterations records them",
    )  # fmt: skip
    if len(profile.knots) != len(profile.dense_ms) or not profile.knots or list(profile.knots) != sorted(profile.knots):
        raise ConfigError(f"{path}: knots and dense_ms must have equal length, and knots must ascend")
    if min(profile.dense_ms) <= 0 or min(profile.context_ms, profile.pair_ms, profile.chunk_ms, profile.decode_ms) < 0:
        raise ConfigError(f"{path} has a negative or zero time")
    for name in ("decodes", "prompts") if profile.side_by_side is not None else ():
        known, spread = (getattr(profile.side_by_side, field) for field in (name, f"{name}_spread"))
        if not known or (spread and (len(spread) != len(known) or not all(spread))):
            raise ConfigError(f"{path}: side_by_side.{name} and its spread must have equal, nonzero length")
    return profile
