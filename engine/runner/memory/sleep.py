"""`SleepableMemory`: the weights and the KV pool of a runner, whose memory can be given back and taken again.

Addresses stay: a captured graph, a kernel's descriptor or a copy engine never learns of it. So tensors lie in *arenas*,
stretches of address space that lose and get back what is under them. The same code runs on both devices; an `Arena` and
a `Backing` are what differs: `arena.py` for a CPU, `cuda_arena.py` for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 512
"""bytes: of each tensor's beginning, as torch's own allocator has it"""


class Arena(Protocol):
    """Memory at an address that stays."""

    @property
    def tensor(self) -> Tensor:
        """`[bytes]` uint8, on the device. Not to be touched while released."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...

    def acquire(self) -> None:
        """Take memory again; what is in it is anything. Raises `OutOfMemory`."""
        ...


class Backing(Protocol):
    """What keeps the weights meanwhile."""

    def keep(self, tensor: Tensor) -> None:
        """Raises `OSError` or `OutOfMemory` where it cannot."""
        ...

    def restore(self, tensor: Tensor) -> None:
        """What was kept. Raises `OSError`."""
        ...


class SleepableMemory:
    """Attributes:
    asleep: the memory is given back.
    """

    def __init__(self, make: Callable[[int], Arena], backing: Backing) -> None:
        """`make`: an arena of so many bytes."""
        self.asleep = False
        self._make = make
        self._backing = backing
        self._kept: Arena | None = None
        """of the weights"""
        self._written = False
        """the backing has them: they never change"""
        self._lost: list[Arena] = []
        """what is in these is not kept"""

    def adopt_weights(self, tensors: Iterable[Tensor]) -> None:
        """Move these, the weights, into an arena: in place, whoever has them sees them there. Once.

        Raises `OutOfMemory`. One is moved after the other, so that at most the largest lies in memory twice.
        """
        assert self._kept is None
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in {id(t): t for t in tensors}.values():
            if tensor.nbytes:
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [views[0].untyped_storage().nbytes() for views in by_storage.values()]
        self._kept = arena = self._make(max(1, sum(_aligned(size) for size in sizes)))
        home, at = arena.tensor, 0
        with torch.inference_mode():
            for views, size in zip(by_storage.values(), sizes, strict=True):
                old = torch.empty(0, dtype=torch.uint8, device=views[0].device).set_(views[0].untyped_storage())
                home[at : at + size].copy_(old)
                del old
                for view in views:
                    offset = at // view.itemsize + view.storage_offset()
                    view.set_(home.untyped_storage(), offset, view.shape, view.stride())
                at += _aligned(size)

    def allocate(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8 of an arena of its own, whose content sleep loses. Raises `OutOfMemory`."""
        self._lost.append(arena := self._make(num_bytes))
        return arena.tensor

    @property
    def num_bytes(self) -> int:
        return sum(arena.tensor.nbytes for arena in self._arenas)

    @property
    def _arenas(self) -> list[Arena]:
        return [*([self._kept] if self._kept is not None else []), *self._lost]

    def sleep(self) -> None:
        """Keep the weights elsewhere and give the memory back. Nothing may run, nor touch it. Idempotent.

        Raises `OSError` or `OutOfMemory` where the weights cannot be kept; then all is as it was.
        """
        if self.asleep:
            return
        if self._kept is not None and not self._written:
            self._backing.keep(self._kept.tensor)
            self._written = True
        for arena in self._arenas:
            arena.release()
        self.asleep = True

    def wake(self) -> None:
        """Take the memory again and bring the weights back. Idempotent. Raises `OutOfMemory` or `OSError`, after which
        only the process's end helps."""
        if not self.asleep:
            return
        for arena in self._arenas:
            arena.acquire()
        if self._kept is not None:
            self._backing.restore(self._kept.tensor)
        self.asleep = False


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
