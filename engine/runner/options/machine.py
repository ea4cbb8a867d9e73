"""What this machine's CPU offers, without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

CPU_MEMORY_SHARE = 0.25  # Maximum share of the machine's memory for KV pages on the CPU.
CPU_SEQUENCES = 256  # Default limit on running requests on a CPU.
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
