"""`HostMemory` and `CudaMemory`: device memory as a file descriptor that other processes map."""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.runner.memory.cuda_arena import OUT_OF_MEMORY, CudaDriver, DriverFailed, view_of
from weft.engine.runner.memory.shared_weights import SharedMemory

GIB = 2**30


def shared_memory(device: torch.device) -> SharedMemory:
    """Return the device's shared memory. Raises `OSError` if there is no driver."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class HostMemory:
    """`SharedMemory` in a sealed memory file."""

    def make(self, num_bytes: int, fill: Callable[[Tensor], None]) -> int:
        fd = os.memfd_create("weft-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, max(1, num_bytes))
            except OSError as error:
                raise OutOfMemory(
                    f"{num_bytes / GIB:.1f} GiB of shared memory do not fit ({error.strerror}): use a smaller model"
                ) from None
            written = mmap.mmap(fd, max(1, num_bytes))
            home = torch.frombuffer(written, dtype=torch.uint8)
            fill(home)
            del home
            written.close()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def map(self, fd: int, num_bytes: int) -> Tensor:
        read = mmap.mmap(fd, max(1, num_bytes), prot=mmap.PROT_READ)
        with warnings.catch_warnings():  # read-only is intended
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(read, dtype=torch.uint8)


class CudaMemory:
    """`SharedMemory` of the CUDA driver, which lives as long as a descriptor or a mapping of it."""

    def __init__(self, device: torch.device) -> None:
        """Raises `OSError` if there is no driver."""
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the context
            self._driver = CudaDriver(device.index or 0)

    def make(self, num_bytes: int, fill: Callable[[Tensor], None]) -> int:
        with self._driving():
            size = self._whole(num_bytes)
            handle = self._driver.create(size, shared=True)
            address = self._driver.reserve(size)
            self._driver.map(address, size, handle)
            fill(view_of(address, num_bytes, self._device))
            torch.cuda.synchronize()
            fd = self._driver.exported(handle)
            self._driver.unmap(address, size)
            self._driver.release(handle)
        return fd

    def map(self, fd: int, num_bytes: int) -> Tensor:
        with self._driving():
            size = self._whole(num_bytes)
            torch.cuda.empty_cache()  # frees the weights that were loaded here and copied there
            handle = self._driver.imported(fd)
            address = self._driver.reserve(size)
            self._driver.map(address, size, handle, writable=False)
            self._driver.release(handle)  # the mapping keeps it
        return view_of(address, num_bytes, self._device)

    @contextmanager
    def _driving(self) -> Iterator[None]:
        try:
            with torch.cuda.device(self._device):
                yield
        except DriverFailed as error:
            if error.code == OUT_OF_MEMORY:
                raise OutOfMemory(
                    "the weights that replicas share do not fit the GPU while loading: use a smaller model"
                ) from None
            raise ConfigError(f"--replicas: the GPU driver cannot share memory between processes ({error})") from None

    def _whole(self, num_bytes: int) -> int:
        step = self._driver.granularity()
        return max(1, -(-num_bytes // step)) * step
