"""`WAYS`: ways to compute the sums of an iteration, by the names that `weft bench ranks` takes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.runner.device.collectives import Steps

VENDOR_SECONDS = 60.0
"""Seconds that ranks wait for each other in the vendor's library."""


class Way(NamedTuple):
    """A way to compute the sums."""

    label: str
    steps: Steps | None
    """Steps of weft's collectives. None: a baseline."""
    vendor: bool = False
    """Whether a baseline uses the vendor's library or computes no sums."""
    overlapped: bool = False
    """Whether two nano-batches overlap sums of one with GEMMs and attention of the other."""


WAYS = {  # serial except for the last two; the vendor's adds no residual and computes no squares
    "none": Way("no sums", None),
    "vendor": Way("all-reduce of NCCL or gloo", None, vendor=True),
    "one": Way("shared memory, one step", Steps(1)),
    "two": Way("shared memory, two steps", Steps(2)),
    "sent-one": Way("GEMMs send, one step", Steps(1, 1)),
    "sent-two": Way("GEMMs send, two steps", Steps(1, 2)),
    "nano": Way("two nano-batches, sums overlapped", Steps(2), overlapped=True),
    "sent-nano": Way("two nano-batches, GEMMs send", Steps(2, 2), overlapped=True),
}


def way_of(name: str) -> tuple[Way, str]:
    """The way and the folder in which ranks find each other, from `NAME` or `NAME:FOLDER`."""
    key, _, folder = name.partition(":")
    return WAYS[key], folder


class Vendor:
    """The all-reduce of torch.distributed: NCCL on GPUs, gloo on a CPU."""

    def __init__(self, rank: int, ranks: int, backend: str) -> None:
        self._rank, self._ranks, self._backend = rank, ranks, backend
        self._open = False

    def open(self, folder: str) -> None:
        """Join the group. Every rank calls this at once with the same new folder. Raises `ConfigError`."""
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
        """Leave the group, so that this process can join another. No captured graph may still use it."""
        if self._open:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._open = False
