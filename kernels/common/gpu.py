"""`Gpu`: the GPU that kernels are made for: this machine's, or a named one for compiling without it.

The command line lists the names, so torch is imported only by the functions that query it. Tensors on the `meta` device
represent tensors of such a GPU: launches with them compile and run nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Gpu(NamedTuple):
    """The properties that kernels, tiles and plans are chosen by."""

    name: str  # The driver's name for it.
    capability: tuple[int, int]
    sms: int


KNOWN = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", (9, 0), 114),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128),
}
"""GPUs by their name in `weft compile --gpu`."""

_pretended: Gpu | None = None


@functools.cache
def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def _properties(index: int) -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count)


def gpu(device: torch.device | int | None = None) -> Gpu | None:
    """Return the GPU that kernels are for: that of `compiling_for`, else this CUDA device (None: the current one).

    Returns None if there is no GPU."""
    if _pretended is not None:
        return _pretended
    import torch

    if not _cuda_is_there():
        return None
    index = device if device is None or isinstance(device, int) else device.index
    return _properties(torch.cuda.current_device() if index is None else index)


def gpu_device() -> torch.device:
    """Return the device for tensors of `gpu()`: the current CUDA device, or the meta device inside `compiling_for`."""
    import torch

    return torch.device("meta") if _pretended is not None else torch.device("cuda", torch.cuda.current_device())


def is_hopper() -> bool:
    """Return whether kernels are for an NVIDIA GPU of compute capability 9."""
    here = gpu()
    return here is not None and here.capability[0] == 9


def on_gpu(device: torch.device) -> bool:
    """Return whether tensors of that device are on a GPU or represent such tensors."""
    return device.type in ("cuda", "meta")


@contextlib.contextmanager
def compiling_for(target: Gpu) -> Iterator[None]:
    """Choose kernels, tiles and plans for `target` inside this context."""
    global _pretended
    before, _pretended = _pretended, target
    try:
        yield
    finally:
        _pretended = before
