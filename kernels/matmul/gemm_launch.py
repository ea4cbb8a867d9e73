"""How a GEMM is launched: its configuration, grid and scratch, for all kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.gpu import is_hopper
from weft.kernels.matmul import tuned
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig


class Workspace(NamedTuple):
    """Scratch of split GEMMs: one per stream that runs GEMMs, allocated before capture."""

    partial: Tensor  # [...] float32
    arrived: Tensor  # [tiles] int32, zero between launches.


def workspace(device: torch.device | str, elements: int = 1 << 24, tiles: int = 1 << 13) -> Workspace:
    return Workspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def choose(num_tokens: int, features: int, depth: int, num_sms: int) -> GemmConfig:
    """Return the configuration of a GEMM with `num_tokens` rows: a measured one if the shape is known, else by rule."""
    if (measured := tuned.lookup(num_tokens, features, depth)) is not None:
        return measured
    if num_tokens <= 128:
        tokens = max(16, triton.next_power_of_2(num_tokens))
        tiles = triton.cdiv(features, 64)
        steps = triton.cdiv(depth, 128)
        # the smallest split with a nearly full last wave: partial sums cost traffic
        per_sm = 2
        slots = per_sm * num_sms
        fill = {s: tiles * s / (triton.cdiv(tiles * s, slots) * slots) for s in (1, 2, 4, 8) if s * 4 <= steps}
        split = next((s for s in fill if fill[s] >= 0.9), max(fill, key=lambda s: fill[s], default=1))
        return GemmConfig(tokens, 64, 128, 4 if tokens <= 32 else 3, 4, 8, split, True, per_sm, 1, ahead=4)
    if triton.cdiv(num_tokens, 128) * triton.cdiv(features, 256) < num_sms:
        return GemmConfig(128, 128, 64, 4, 8 if num_tokens > 256 else 4, 8, 1, False, 1, 1)
    return SPECIAL if is_hopper() else GemmConfig(128, 256, 64, 3, 8)


class Launch(NamedTuple):
    """Launch parameters that every GEMM needs besides its operands."""

    grid: tuple[int, ...]
    config: GemmConfig
    split: int
    options: dict[str, int | bool]


def launch_of(num_tokens: int, features: int, depth: int, config: GemmConfig | None, num_sms: int) -> Launch:
    config = config or choose(num_tokens, features, depth, num_sms)
    steps = -(-depth // config.depth)  # on the host, triton.cdiv takes microseconds
    split = config.split
    while split > 1 and -(-steps // split) * (split - 1) >= steps:  # no split may be empty
        split -= 1
    units = -(-num_tokens // config.tokens) * -(-features // config.features) * split
    grid = min(num_sms * config.per_sm, units)
    early = pdl_options()
    options = {
        "AHEAD": config.ahead if early["PDL"] else 0,
        "ONCE": grid == units,  # every program has one tile: it may release the next kernel before its epilogue
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return Launch((grid,), config, split, options | early)


def check_operands(a: Tensor, weight: Tensor) -> None:
    if a.dtype != weight.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"operands must both be bfloat16 or float16, not {a.dtype} and {weight.dtype}")
    if a.shape[1] != weight.shape[1]:
        raise ValueError(f"depths differ: {tuple(a.shape)} and {tuple(weight.shape)}")
    if a.shape[1] % 8 or a.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("rows must be contiguous and a multiple of 16 bytes long")


def check_workspace(space: Workspace | None, launch: Launch, num_tokens: int, features: int) -> Workspace | None:
    if launch.split == 1:
        return None
    c = launch.config
    count = -(-num_tokens // c.tokens) * -(-features // c.features)
    if (
        space is None
        or space.arrived.numel() < count
        or space.partial.numel() < count * launch.split * (c.tokens * c.features)
    ):
        raise ValueError(f"a GEMM split over {launch.split} programs needs a larger workspace ({count} tiles)")
    return space
