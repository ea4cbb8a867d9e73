"""Attention backends by name: `triton` (default on a GPU), `flash-attn`, `torch` (the reference, any device).

A backend's dependencies are imported when it is made: `check` and `choose` need neither Triton nor a package.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from weft.kernels.attention.backend import AttentionShape, AttentionUnavailable, HostAttention
from weft.kernels.common.gpu import on_gpu
from weft.kernels.formats.fp8 import E4M3

BackendName = Literal["triton", "flash-attn", "torch"]
NAMES: tuple[BackendName, ...] = ("triton", "flash-attn", "torch")
TRITON_PAGE_SIZES = (16, 32, 64, 128)
TRITON_HEAD_DIMS = range(16, 257, 16)
TRITON_MAX_GROUP = 16


def choose(name: str, device: torch.device) -> BackendName:
    """Return the backend for `name` on this device; `auto` is triton on a GPU, torch elsewhere."""
    if name == "auto":
        return "triton" if on_gpu(device) else "torch"
    for known in NAMES:
        if name == known:
            return known
    raise AttentionUnavailable(f"unknown attention backend {name!r}; choose from {', '.join(NAMES)}")


def check(name: BackendName, shape: AttentionShape) -> None:
    """Raise `AttentionUnavailable` if the backend cannot serve `shape`. Allocates nothing."""
    if name == "torch":
        return
    if shape.pool_dtype != shape.dtype and (name != "triton" or shape.pool_dtype != E4M3):
        raise AttentionUnavailable(f"the {name} attention backend supports only pages of the queries' dtype; use torch")
    if name != "triton" and (lacking := _lacking(shape)):
        raise AttentionUnavailable(f"the {name} attention backend does not support {lacking}; use torch")
    if not on_gpu(shape.device):
        raise AttentionUnavailable(f"the {name} attention backend needs a GPU; on a CPU use auto or torch")
    if name == "triton":
        check_triton(shape)
    else:
        from weft.kernels.attention.flash_backend import check_flash

        check_flash(shape)


def _lacking(shape: AttentionShape) -> str:
    """Return the first feature of the shape that the flash-attn backend does not support, or ""."""
    parts = {
        "sliding windows": any(shape.windows),
        "a custom scale of the scores": shape.scale not in (None, shape.head_dim**-0.5),
        "soft-cap on scores": bool(shape.softcap),
        "attention sinks": shape.sinks,
        "latent attention": bool(shape.latent),
    }
    return next((name for name, asked in parts.items() if asked), "")


def check_triton(shape: AttentionShape) -> None:
    """Raise `AttentionUnavailable` if the Triton kernels do not support `shape`."""
    if shape.latent:
        raise AttentionUnavailable("the triton attention backend does not support latent attention yet; use torch")
    if shape.head_dim not in TRITON_HEAD_DIMS:
        raise AttentionUnavailable(
            f"the triton attention backend supports head_dim 16, 32, 48 ... 256, the model has {shape.head_dim}; "
            "use flash-attn or torch"
        )
    if shape.page_size not in TRITON_PAGE_SIZES:
        raise AttentionUnavailable(
            f"the triton attention backend supports pages of 16, 32, 64 or 128 tokens, not {shape.page_size}; "
            "change the page size, or use flash-attn or torch"
        )
    if shape.group > TRITON_MAX_GROUP:
        raise AttentionUnavailable(
            f"the triton attention backend supports up to {TRITON_MAX_GROUP} query heads per KV head, "
            f"the model has {shape.group}; use flash-attn or torch"
        )


def make_host_attention(
    name: BackendName, shape: AttentionShape, *, batch_invariant: bool = False, native: bool = False
) -> HostAttention[Any]:
    """Return a backend that plans on the host. Raises `AttentionUnavailable`. For `triton` see `triton_backend`.

    batch_invariant: a request's sums are added in the same order in any batch. native: compute decodes of `torch` in
    C++, if they can be."""
    if name == "torch":
        from weft.kernels.attention.native_backend import NativeAttention, serves
        from weft.kernels.attention.torch_backend import TorchAttention

        if native and serves(shape):
            return NativeAttention(shape, batch_invariant=batch_invariant)
        return TorchAttention(shape, batch_invariant=batch_invariant)
    if name == "flash-attn":
        from weft.kernels.attention.flash_backend import FlashAttention

        return FlashAttention(shape, batch_invariant=batch_invariant)
    raise AttentionUnavailable(f"{name} plans on the device; use flash-attn or torch")
