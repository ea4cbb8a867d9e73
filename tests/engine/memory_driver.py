"""`MemoryDriver`: a driver of GPU memory made of a dictionary and a tensor on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.runner.memory.cuda_arena import CudaArena, DriverFailed, PinnedBacking
from weft.engine.runner.memory.sleep import SleepableMemory


class MemoryDriver:
    """A GPU's memory as a dictionary; addresses are those of a tensor on the host."""

    STEP = 4096

    def __init__(self, size: int) -> None:
        self.size = size
        self.created: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.space = torch.zeros(2**24, dtype=torch.uint8)
        self._next = 0
        self.settled = 0

    def granularity(self) -> int:
        return self.STEP

    def reserve(self, size: int) -> int:
        assert size % self.STEP == 0
        at, self._next = self._next, self._next + size
        return at

    def create(self, size: int) -> int:
        if sum(self.created.values()) + size > self.size:
            raise DriverFailed("cuMemCreate", 2)
        handle = len(self.created) + 100
        self.created[handle] = size
        return handle

    def map(self, address: int, size: int, handle: int) -> None:
        assert self.created[handle] == size
        assert address not in self.mapped
        self.mapped[address] = handle
        self.space[address : address + size] = 0xEE  # the previous content is undefined

    def unmap(self, address: int, size: int) -> None:
        assert self.settled, "it may still be in use"
        del self.mapped[address]
        self.space[address : address + size] = 0xDD

    def release(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        del self.created[handle]

    def view(self, address: int, size: int) -> Tensor:
        return self.space[address : address + size]

    def settle(self) -> None:
        self.settled += 1

    def sleepable(self) -> SleepableMemory:
        return SleepableMemory(
            lambda size: CudaArena(size, self, self.view, self.settle),
            PinnedBacking(lambda size: torch.empty(size, dtype=torch.uint8)),
        )
