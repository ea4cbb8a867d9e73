"""`SleepableMemory`: memory of a runner's weights and KV pool that can be released and acquired again.

Addresses stay the same, so captured graphs, kernel descriptors and copy engines remain valid. Tensors lie in *arenas*,
address ranges whose memory comes and goes. Devices differ in their `Arena` and `Backing`: `host_arena.py` for a CPU,
`cuda_arena.py` for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from weft.engine.errors import ConfigError

ALIGNMENT = 512  # Alignment of tensors in bytes, as in torch's allocator.


class Arena(Protocol):
    """Memory at a fixed address."""

    @property
    def tensor(self) -> Tensor:
        """`[bytes]` uint8 on the device. Must not be accessed while released."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...

    def acquire(self) -> None:
        """Take memory again, with undefined content. Raises `OutOfMemory`."""
        ...


class Backing(Protocol):
    """Keeps the weights while the model sleeps."""

    def keep(self, tensor: Tensor) -> None:
        """Store the content. Raises `OSError` or `OutOfMemory`."""
        ...

    def restore(self, tensor: Tensor) -> None:
        """Write the stored content to `tensor`. Raises `OSError`."""
        ...


class Sleepless:
    """Takes the place of `SleepableMemory` in a runner that cannot sleep. Its methods raise `ConfigError`."""

    asleep, num_bytes = False, 0

    def __init__(self, why: str = "sleep was not enabled at start") -> None:
        self._why = why

    def check(self) -> None:
        raise ConfigError(self._why)

    sleep = wake = check


class SleepableMemory:
    """The arenas of a runner and the backing of its weights."""

    def __init__(self, make: Callable[[int], Arena], backing: Backing) -> None:
        """make: allocates an arena of a number of bytes."""
        self.asleep = False  # The memory is released.
        self._make = make
        self._backing = backing
        self._weights: Arena | None = None  # Arena of the weights.
        self._backed_up = False  # The backing has the weights, which never change.
        self._volatile: list[Arena] = []  # Arenas that lose their content.

    def adopt_weights(self, tensors: Iterable[Tensor]) -> None:
        """Move the weights into an arena, in place: existing references stay valid. Call once. Raises `OutOfMemory`.

        They are moved one at a time, so that at most the largest exists twice."""
        assert self._weights is None
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in {id(t): t for t in tensors}.values():
            if tensor.nbytes:
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [views[0].untyped_storage().nbytes() for views in by_storage.values()]
        self._weights = arena = self._make(max(1, sum(_aligned(size) for size in sizes)))
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
        """Return `[num_bytes]` uint8 of a new arena, which loses its content during sleep. Raises `OutOfMemory`."""
        self._volatile.append(arena := self._make(num_bytes))
        return arena.tensor

    @property
    def num_bytes(self) -> int:
        return sum(arena.tensor.nbytes for arena in self._arenas)

    @property
    def _arenas(self) -> list[Arena]:
        return [*([self._weights] if self._weights is not None else []), *self._volatile]

    def check(self) -> None:
        """Raise `ConfigError` if the model cannot sleep."""

    def sleep(self) -> None:
        """Store the weights and release the memory. Nothing may run or access it. Idempotent.

        Raises `OSError` or `OutOfMemory`, without any effect, if the weights cannot be stored."""
        if self.asleep:
            return
        if self._weights is not None and not self._backed_up:
            self._backing.keep(self._weights.tensor)
            self._backed_up = True
        for arena in self._arenas:
            arena.release()
        self.asleep = True

    def wake(self) -> None:
        """Acquire the memory and restore the weights. Idempotent. Raises `OutOfMemory` or `OSError`, after which the
        process must end."""
        if not self.asleep:
            return
        for arena in self._arenas:
            arena.acquire()
        if self._weights is not None:
            self._backing.restore(self._weights.tensor)
        self.asleep = False


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
