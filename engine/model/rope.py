"""`Rope`: rotary position embeddings with the scalings that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.engine.errors import ModelError

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`rope_scaling` of the config: 'default', 'linear', 'dynamic' (NTK by position limit), 'llama3', 'yarn' or
    'longrope'."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # yarn: the blended range of dimensions begins and ends at integers.
    short_factors: tuple[float, ...] = ()  # longrope: factor per frequency within the original context.
    long_factors: tuple[float, ...] = ()  # longrope: factor per frequency beyond it.


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of some layers."""

    theta: float
    scaling: RopeScaling = RopeScaling()
    part: float = 1.0  # Share of a head's dimensions that are rotated, from the first.
    interleaved: bool = False  # The checkpoint stores the two halves of a pair next to each other.
    sections: tuple[int, ...] = ()
    """M-RoPE: pairs that turn with a token's time, height and width; (): all turn with one position."""
    alternate: bool = False  # M-RoPE: the axes alternate from pair to pair, instead of one section after another.

    def dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.part)

    def axes(self, pairs: int) -> tuple[int, ...]:
        """Return the axis of each of a head's pairs: 0 time, 1 height, 2 width."""
        if self.alternate:
            return tuple(p % 3 if p < 3 * self.sections[p % 3] else 0 for p in range(pairs))
        own = [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        return tuple((own + [0] * pairs)[:pairs])


def inv_freq(head_dim: int, rope: Rope, max_positions: int = 0) -> tuple[torch.Tensor, float]:
    """Return rotary frequencies `[rotary dims / 2]` float32 and the factor on cos and sin.

    max_positions: the longest served context. It decides the factors of longrope for all lengths: a model serves either
    within its original context or beyond it."""
    import torch  # here, so that reading a config does not load torch

    dim, s = rope.dim(head_dim), rope.scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv = 1.0 / (rope.theta**exponent)
    match s.kind:
        case "linear":
            return inv / s.factor, 1.0
        case "dynamic":
            # The base is unchanged within the original context, and weft serves no more than max_positions.
            return inv, 1.0
        case "llama3":
            return _llama3(inv, s), 1.0
        case "yarn":
            return _yarn(inv, dim, rope.theta, s)
        case "longrope":
            return _longrope(inv, s, max_positions)
        case _:
            return inv, 1.0


def _llama3(inv: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    import torch

    wavelength = 2 * math.pi / inv
    low, high = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
    smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    mixed = (1 - smooth) * inv / s.factor + smooth * inv
    scaled = torch.where(wavelength > low, inv / s.factor, inv)
    return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(inv: torch.Tensor, dim: int, theta: float, s: RopeScaling) -> tuple[torch.Tensor, float]:
    import torch

    def bound(rotations: float) -> float:
        return dim * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = bound(s.beta_fast), bound(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    factor = _magnitude(s.factor) if s.attention_factor is None else s.attention_factor
    return inv / s.factor * (1 - keep) + inv * keep, factor


def _longrope(inv: torch.Tensor, s: RopeScaling, max_positions: int) -> tuple[torch.Tensor, float]:
    import torch

    factors = s.long_factors if max_positions > s.original_max_positions else s.short_factors
    if len(factors) != len(inv):
        raise ModelError(f"longrope has {len(factors)} factors for {len(inv)} frequencies")
    scale = s.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_positions)) if s.factor > 1 else 1.0
    return inv / torch.tensor(factors), scale


def read_rope(config: dict[str, Any], max_positions: int, layer_type: str = "") -> Rope:
    """Read the rope of a `config.json`, for one type of layer if they differ. Raises `ModelError`."""
    # transformers 5 writes `rope_parameters`; earlier checkpoints have `rope_theta` and `rope_scaling`.
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    raw = raw.get(layer_type) or raw
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    if kind == "mrope" and raw.get("mrope_section"):
        kind = "default"
    if kind not in KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported ({', '.join(KINDS)} are)")
    original = (
        raw.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or max_positions
    )
    factor = raw.get("factor")
    if factor is None:
        factor = max_positions / original if kind in ("yarn", "longrope") else 1.0
    attention_factor = raw.get("attention_factor")
    if kind == "yarn" and attention_factor is None and raw.get("mscale") and raw.get("mscale_all_dim"):
        attention_factor = _magnitude(factor, raw["mscale"]) / _magnitude(factor, raw["mscale_all_dim"])
    return Rope(
        theta,
        RopeScaling(
            kind=kind,
            factor=float(factor),
            low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
            high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
            original_max_positions=int(original),
            beta_fast=float(raw.get("beta_fast") or 32.0),
            beta_slow=float(raw.get("beta_slow") or 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            truncate=bool(raw.get("truncate", True)),
            short_factors=tuple(map(float, raw.get("short_factor") or ())),
            long_factors=tuple(map(float, raw.get("long_factor") or ())),
        ),
        part=float(raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
        interleaved=bool(config.get("rope_interleaved", False)),
        sections=tuple(map(int, raw.get("mrope_section") or ())),
        alternate=bool(raw.get("mrope_interleaved", False)),
    )


def unscaled(theta: float, like: Rope) -> Rope:
    """Return `like` with another theta and without scaling, for local layers."""
    return replace(like, theta=theta, scaling=RopeScaling())
