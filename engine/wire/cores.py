"""`shares`: which cores each rank of a CPU runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NODES = Path("/sys/devices/system/node")
LEAST = 2
"""cores a rank, for pinning to be worth it: with fewer, whoever else runs takes a rank's only core, and all wait"""


def shares(cpus: set[int], nodes: Mapping[int, int], ranks: int) -> list[set[int]]:
    """As many cores for each rank, neighbours on one NUMA node as far as they go; empty where they are too few.

    nodes: the node of each core.
    """
    each = len(cpus) // ranks
    if each < LEAST:
        return []
    ordered = sorted(cpus, key=lambda cpu: (nodes.get(cpu, 0), cpu))
    return [set(ordered[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def nodes_here() -> dict[int, int]:
    """The NUMA node of each core; empty where the system does not tell."""
    found: dict[int, int] = {}
    try:
        for node in NODES.glob("node[0-9]*"):
            for part in (node / "cpulist").read_text().strip().split(","):
                first, _, last = part.partition("-")
                if first:
                    found |= dict.fromkeys(range(int(first), int(last or first) + 1), int(node.name[4:]))
    except (OSError, ValueError):
        return {}
    return found


def threads(cores: int, ranks: int) -> int:
    """of each rank: all cores but one, which is for the scheduler and the API"""
    return max(1, (cores - 1) // ranks)


def cores() -> int:
    """that this process may use"""
    return len(os.sched_getaffinity(0))
