"""`WAYS`: how the sums of an iteration are made where they are compared, by the names that `weft bench ranks` takes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.runner.device.collectives import Steps

VENDOR_SECONDS = 60.0
"""that ranks wait for each other in the vendor's library"""


class Way(NamedTuple):
    """One of them."""

    label: str
    steps: Steps | None
    """of our own; None: a baseline"""
    vendor: bool = False
    """by the vendor's library, else not at all"""
    overlapped: bool = False
    """in two nano-batches, beside the products and the attention of the other one"""


WAYS = {  # in series, but for the last two; a vendor's adds no residual and leaves no squares for the next norm
    "none": Way("no sums", None),
    "vendor": Way("all-reduce of NCCL or gloo", None, vendor=True),
    "one": Way("shared memory, one step", Steps(1)),
    "two": Way("shared memory, two steps", Steps(2)),
    "sent-one": Way("products send, one step", Steps(1, 1)),
    "sent-two": Way("products send, two steps", Steps(1, 2)),
    "nano": Way("two nano-batches, sums beside", Steps(2), overlapped=True),
    "sent-nano": Way("two nano-batches, products send", Steps(2, 2), overlapped=True),
}


def way_of(name: str) -> tuple[Way, str]:
    """The way, and the folder in which ranks find each other: `NAME` or `NAME:FOLDER`."""
    key, _, folder = name.partition(":")
    return WAYS[key], folder


class Vendor:
    """The all-reduce of torch.distributed: NCCL on GPUs, gloo on a CPU."""

    def __init__(self, rank: int, ranks: int, backend: str) -> None:
        self._rank, self._ranks, self._backend = rank, ranks, backend
        self._open = False

    def open(self, folder: str) -> None:
        """Every rank at once, with the same new folder. Raises `ConfigError`. Once."""
        if self._open:
            return
        import torch.distributed as dist

        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        try:
            dist.init_process_group(
                self._backend, init_method=f"file://{folder}/ranks", rank=self._rank, world_size=self._ranks,
                timeout=timedelta(seconds=VENDOR_SECONDS),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"{self._backend} cannot be used: {str(error).splitlines()[0]}") from None
        self._open = True

    def all_reduce(self, partial: Tensor) -> None:
        import torch.distributed as dist

        dist.all_reduce(partial)

    def close(self) -> None:
        """Leave what `open` joined: this process may join another. Not while a captured graph has some of it."""
        if self._open:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._open = False
