"""What this machine's CPU offers, without torch."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

CPU_MEMORY_SHARE = 0.25  # Maximum share of the machine's memory for KV pages on the CPU.
CPU_SEQUENCES = 256  # Default limit on running requests on a CPU.
CACHED_BYTES = 128 << 20  # Caches may hold this much, so memory bounds only what reads more.
_BFLOAT16 = {"avx512_bf16", "amx_tile"}


def machine_memory() -> int:
    """Return the memory that this process may use: the machine's within its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16, as `torch.cpu` finds it."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and not _BFLOAT16.isdisjoint(flags[1].split())


def read_bandwidth() -> float:
    """Measure the bytes a second that the process's cores read from memory together, the best of three passes."""
    threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(CACHED_BYTES // 8, np.uint64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return CACHED_BYTES / best
