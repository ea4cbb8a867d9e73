"""What a process waits for before its first kernel, begun in threads early on: each calls what leaves Python free."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module


def hash_triton() -> threading.Thread:
    """Have Triton hash its own library, hundreds of megabytes: part of the name of whatever it has in its cache."""
    cache = import_module("triton.runtime.cache")
    key: Callable[[], str] = getattr(cache, "triton_key", str)  # remembered; not public, so it may go
    return _begun(key, "weft-hash-triton")


def open_gpu() -> threading.Thread:
    """Initialise the driver and make the first GPU's context, which torch will find. What fails, torch will tell."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first call
    return _begun(_open_gpu, "weft-open-gpu")


def _open_gpu() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _begun(work: Callable[[], object], name: str) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
