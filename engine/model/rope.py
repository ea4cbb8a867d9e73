"""`Rope`: rotary position embedding of a model, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.engine.errors import ModelError

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`rope_scaling` of the config: 'default', 'linear', 'dynamic' (NTK by position limit), 'yarn' or 'llama3'."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


def inv_freq(head_dim: int, theta: float, s: RopeScaling) -> tuple[torch.Tensor, float]:
    """Rotary frequencies `[head_dim/2]` float32 and the factor on cos and sin."""
    import torch  # here: who reads a config, to refuse it or to list it, need not wait for torch

    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv = 1.0 / (theta**exponent)
    match s.kind:
        case "linear":
            return inv / s.factor, 1.0
        case "dynamic":
            # Within the original context the base is unchanged; weft serves no longer than max_positions.
            return inv, 1.0
        case "llama3":
            return _llama3(inv, s), 1.0
        case "yarn":
            return _yarn(inv, head_dim, theta, s)
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


def _yarn(inv: torch.Tensor, head_dim: int, theta: float, s: RopeScaling) -> tuple[torch.Tensor, float]:
    import torch

    def bound(rotations: float) -> float:
        return head_dim * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low_dim, high_dim = max(math.floor(bound(s.beta_fast)), 0), min(math.ceil(bound(s.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low_dim) / max(high_dim - low_dim, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    factor = s.attention_factor
    if factor is None:
        factor = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return inv / s.factor * (1 - keep) + inv * keep, factor


def read_rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) of a `config.json`. Raises `ModelError`."""
    # transformers 5 writes `rope_parameters`; earlier checkpoints have `rope_theta` and `rope_scaling`.
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported (default, linear, dynamic, llama3 and yarn are)")
    if float(raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    scaling = RopeScaling(
        kind=kind,
        factor=float(raw.get("factor") or 1.0),
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
        original_max_positions=int(
            raw.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or max_positions
        ),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        attention_factor=raw.get("attention_factor"),
    )
    if kind == "yarn" and (raw.get("mscale") or raw.get("mscale_all_dim")):
        raise ModelError("yarn rope scaling with mscale is not supported")
    return theta, scaling
