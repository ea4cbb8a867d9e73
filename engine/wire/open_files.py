"""The limit of open files (`ulimit -n`): how many files a daemon needs, and raising the limit."""

from __future__ import annotations

import resource
from contextlib import suppress

OWN, FOR_RANK, FOR_API = 128, 16, 8
"""Files of each of a daemon's processes, without connections: for itself (including GPU libraries), per rank of an
engine, and per API process."""
ENOUGH = 4096  # a limit that is also enough for the connections of an API process
HOW = f"ulimit -Hn {ENOUGH}, LimitNOFILE={ENOUGH} in a systemd unit, --ulimit nofile={ENOUGH} for a container"


def needed(ranks: int = 1, api_processes: int = 1) -> int:
    """Return how many files each of a daemon's processes must be able to open. `ranks` counts those of all engines."""
    return OWN + FOR_RANK * ranks + FOR_API * api_processes


def raise_limit() -> float:
    """Raise this process's soft limit to the hard limit if possible, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return float("inf") if soft == resource.RLIM_INFINITY else soft
