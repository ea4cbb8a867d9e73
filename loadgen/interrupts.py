"""Ctrl-C where an exception in the middle of things would leave halves behind, which complain when they go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run(work())`, but an interrupt that comes while the event loop is made waits until it is whole."""
    runner = asyncio.Runner()
    try:
        with _later():
            runner.get_loop()
        return runner.run(work())
    finally:
        runner.close()


@contextmanager
def _later() -> Iterator[None]:
    """An interrupt comes at the end, to whoever heard it before."""
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def starting_processes() -> Iterator[None]:
    """Processes that are started meanwhile never hear of an interrupt: a terminal sends it to all, and one that still
    imports would end with a traceback. Ours, where another thread got it or when this is over, does."""
    resource_tracker.ensure_running()  # it would let interrupts through when it starts with the first process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
