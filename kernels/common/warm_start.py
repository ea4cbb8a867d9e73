"""Starts slow initialization that precedes the first kernel in threads. All of it releases the GIL."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module


def hash_triton() -> threading.Thread:
    """Make Triton hash its library (hundreds of megabytes): the hash is part of every key of its cache."""
    cache = import_module("triton.runtime.cache")
    key: Callable[[], str] = getattr(cache, "triton_key", str)  # cached; not public, so it may disappear
    return _start_thread(key, "weft-hash-triton")


def open_gpu() -> threading.Thread:
    """Initialize the driver and create the first GPU's context for torch. Torch reports any failure."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first call
    return _start_thread(_open_gpu, "weft-open-gpu")


def _open_gpu() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
