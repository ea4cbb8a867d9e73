"""A free port."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port below the kernel's ephemeral range, so that no client's connection takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
