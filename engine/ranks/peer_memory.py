"""`PeerMemory`: GPU memory that kernels of other ranks read and write, shared through CUDA IPC handles.

It calls the driver directly: torch opens a handle on the exporter's GPU, and its allocator uses memory that cannot be
exported.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.runner.device.collectives import Collectives

_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class _Raw:
    """Presents raw device memory to torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,
        }  # fmt: skip


class PeerMemory:
    """Allocates `size` zeroed bytes on each rank. Collective: all ranks must construct it at the same point.

    Raises `ConfigError` if the GPUs cannot access each other's memory.

    Attributes:
    memory: `[size]` uint8, this rank's memory.
    bases: each rank's base address as this rank sees it.
    addresses: the same, `[ranks]` int64 on the device."""

    def __init__(self, size: int, device: torch.device, collectives: Collectives) -> None:
        """collectives: host collectives."""
        torch.cuda.synchronize(device)  # creates the context
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        own = ctypes.c_uint64()
        failed = self._called("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(size))
        handle = _Handle()
        if not failed:
            failed = self._called("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            failed = failed or self._called("cuIpcGetMemHandle", ctypes.byref(handle), own)
        torch.cuda.synchronize(device)
        exported = torch.frombuffer(bytearray(ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)), dtype=torch.uint8)
        addresses = [own.value] * collectives.ranks
        for rank, theirs in enumerate(collectives.all_gather(exported)):
            if rank != collectives.rank and not failed:
                address = ctypes.c_uint64()
                peer = _Handle.from_buffer_copy(theirs.numpy().tobytes())
                failed = self._called("cuIpcOpenMemHandle_v2", ctypes.byref(address), peer, _PEER_ACCESS)
                addresses[rank] = address.value
        if any(collectives.all_gather(torch.tensor([bool(failed)])).flatten().tolist()):
            raise ConfigError(
                "--tensor-parallel-size: the GPUs cannot access each other's memory"
                f"{f' ({failed})' if failed else ''}; nvidia-smi topo -p2p rw lists the pairs that can"
            )
        self.memory: Tensor = torch.as_tensor(_Raw(own.value, size), device=device)
        self.bases = tuple(addresses)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def _called(self, name: str, *arguments: Any) -> str:
        """Call a driver function. Returns the error, or "" on success."""
        code = getattr(self._driver, name)(*arguments)
        return f"{name}: error {code}" if code else ""
