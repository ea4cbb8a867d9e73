"""Prints a free port, because jobs run in parallel: `port=$(python benchmarks/jobs/free_port.py)`."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    print(free_port())
