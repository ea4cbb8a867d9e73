"""The limit of open files (`ulimit -n`): raised as far as it goes, and what a daemon needs of it."""

from __future__ import annotations

import resource
from contextlib import suppress

OWN, FOR_RANK, FOR_API = 128, 16, 8
"""files of any one of a daemon's processes, without connections: for itself (the libraries of a GPU included), and for
each rank of an engine and each API process that there is"""
ENOUGH = 4096
"""for the connections of an API process, too"""
HOW = f"ulimit -Hn {ENOUGH}, LimitNOFILE={ENOUGH} in a systemd unit, --ulimit nofile={ENOUGH} for a container"


def needed(ranks: int = 1, api_processes: int = 1) -> int:
    """How many each of a daemon's processes must be able to open. `ranks`: of all engines, one of each at least."""
    return OWN + FOR_RANK * ranks + FOR_API * api_processes


def raise_limit() -> float:
    """Raise this process's soft limit to the hard one, where that can be. Returns what it is then, in files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return float("inf") if soft == resource.RLIM_INFINITY else soft
