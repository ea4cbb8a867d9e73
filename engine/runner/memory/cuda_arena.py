"""`CudaArena` and `PinnedBacking`: a model's memory on a GPU, and the host memory that keeps its weights during sleep.

The driver separates addresses from memory: an arena reserves addresses once, and maps physical memory to them while the
model is awake. Tests run it with a simulated driver; `tests/gpu/test_sleep.py` uses the real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.runner.memory.sleep import SleepableMemory

GIB = 2**30
CHUNK = 2**28  # Bytes of one pinned allocation.
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of the driver.


class DriverFailed(Exception):
    """A call of the CUDA driver failed."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUDA error {code}")
        self.code = code


class Driver(Protocol):
    """Calls of the CUDA driver that an arena uses. Each raises `DriverFailed`."""

    def granularity(self) -> int:
        """Return the bytes that sizes and addresses must be multiples of."""
        ...

    def reserve(self, size: int) -> int: ...

    def create(self, size: int) -> int:
        """Allocate physical memory and return its handle."""
        ...

    def map(self, address: int, size: int, handle: int) -> None:
        """Map the memory to the addresses, readable and writable."""
        ...

    def unmap(self, address: int, size: int) -> None: ...

    def release(self, handle: int) -> None: ...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """`Driver` through libcuda, on the context that torch has created."""

    DEVICE, PINNED, READ, READ_WRITE = 1, 1, 1, 3
    DESCRIPTOR = 1  # Export handles to other processes as file descriptors.

    def __init__(self, device: int) -> None:
        """Raises `OSError` if there is no driver."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._place = _Location(self.DEVICE, device)
        self._prop = _AllocationProp(type=self.PINNED, location=self._place)
        self._shared = _AllocationProp(type=self.PINNED, handle_types=self.DESCRIPTOR, location=self._place)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise DriverFailed(name, code)

    def granularity(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._prop), ctypes.c_int(0))
        return size.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), none, none)
        return address.value

    def create(self, size: int, *, shared: bool = False) -> int:
        """shared: `exported` accepts the handle."""
        handle = ctypes.c_uint64()
        none, prop = ctypes.c_uint64(0), self._shared if shared else self._prop
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(prop), none)
        return handle.value

    def exported(self, handle: int) -> int:
        """Return a file descriptor that keeps the memory alive. The caller closes it."""
        fd, none = ctypes.c_int(-1), ctypes.c_uint64(0)
        self._call(
            "cuMemExportToShareableHandle", ctypes.byref(fd), ctypes.c_uint64(handle), ctypes.c_int(self.DESCRIPTOR),
            none,
        )  # fmt: skip
        return fd.value

    def imported(self, fd: int) -> int:
        """Return a handle of a descriptor's memory, also of another process. The descriptor may be closed then."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(self.DESCRIPTOR)
        )
        return handle.value

    def map(self, address: int, size: int, handle: int, *, writable: bool = True) -> None:
        at, length, none = ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemMap", at, length, ctypes.c_size_t(0), ctypes.c_uint64(handle), none)
        access = _Access(self._place, self.READ_WRITE if writable else self.READ)
        self._call("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))


class _Span:
    """An address range in the form that torch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def view_of(address: int, size: int, device: torch.device) -> Tensor:
    """Return the memory at this address as `[size]` uint8."""
    return torch.as_tensor(_Span(address, size), device=device)


class CudaArena:
    """`Arena` on a GPU."""

    def __init__(
        self, num_bytes: int, driver: Driver, view: Callable[[int, int], Tensor], settle: Callable[[], None]
    ) -> None:
        """view: returns the memory at an address and size. settle: waits until the device has finished. Raises
        `OutOfMemory`."""
        self._driver, self._settle = driver, settle
        step = driver.granularity()
        self._size = -(-num_bytes // step) * step
        self._address = driver.reserve(self._size)
        self._handle: int | None = None
        self.acquire()
        self.tensor = view(self._address, num_bytes)

    def release(self) -> None:
        """Idempotent."""
        if self._handle is None:
            return
        self._settle()
        self._driver.unmap(self._address, self._size)
        self._driver.release(self._handle)
        self._handle = None

    def acquire(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            return
        try:
            handle = self._driver.create(self._size)
        except DriverFailed as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(
                f"{self._size / GIB:.1f} GiB do not fit the GPU: lower memory_share or --gpu-memory-utilization"
            ) from None
        self._driver.map(self._address, self._size, handle)
        self._handle = handle


class PinnedBacking:
    """`Backing` in pinned host memory. It stays allocated, because weights do not change."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        """make: allocates host memory, `[bytes]` uint8."""
        self._make = make
        self._parts: list[Tensor] = []

    def keep(self, tensor: Tensor) -> None:
        try:
            self._parts = [self._make(len(part)) for part in tensor.split(CHUNK)]
        except RuntimeError as error:  # torch has no specific class
            self._parts = []
            raise OutOfMemory(f"{tensor.nbytes / GIB:.1f} GiB of host memory cannot be pinned: {error}") from None
        self._copy(zip(self._parts, tensor.split(CHUNK), strict=True))

    def restore(self, tensor: Tensor) -> None:
        self._copy(zip(tensor.split(CHUNK), self._parts, strict=True))

    @staticmethod
    def _copy(pairs: Any) -> None:
        for to, part in pairs:
            to.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def cuda_sleepable_memory(device: torch.device) -> SleepableMemory:
    """Return the memory of a runner on a GPU. Raises `OSError` if there is no driver."""
    driver = CudaDriver(device.index or 0)

    def view(address: int, size: int) -> Tensor:
        return view_of(address, size, device)

    def settle() -> None:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def make(num_bytes: int) -> CudaArena:
        return CudaArena(num_bytes, driver, view, settle)

    return SleepableMemory(make, PinnedBacking(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True)))
