"""`shares`: assigns cores to the ranks of a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NODES = Path("/sys/devices/system/node")
LEAST = 2
"""Minimum cores per rank for pinning: with fewer, another process may take a rank's only core, and all ranks wait."""


def shares(cpus: set[int], nodes: Mapping[int, int], ranks: int) -> list[set[int]]:
    """Return equally many cores for each rank, on one NUMA node if possible; empty if there are too few. `nodes` gives
    the node of each core."""
    each = len(cpus) // ranks
    if each < LEAST:
        return []
    ordered = sorted(cpus, key=lambda cpu: (nodes.get(cpu, 0), cpu))
    return [set(ordered[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def read_cpus(file: Path) -> set[int]:
    """Return the cores of a list like 0-3,8. Raises `OSError` or `ValueError`."""
    bounds = [part.partition("-") for part in file.read_text().strip().split(",") if part]
    return {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}


def nodes_here() -> dict[int, int]:
    """Return the NUMA node of each core; empty if unknown."""
    found: dict[int, int] = {}
    try:
        for node in NODES.glob("node[0-9]*"):
            found |= dict.fromkeys(read_cpus(node / "cpulist"), int(node.name[4:]))
    except (OSError, ValueError):
        return {}
    return found


def threads(cores: int, ranks: int) -> int:
    """Return the threads per rank: all cores but one, which is left to the scheduler and the API."""
    return max(1, (cores - 1) // ranks)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
