"""Delays Ctrl-C in places where an exception would leave half-built objects that fail in their destructors."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like `asyncio.run(work())`, but delays an interrupt that arrives while the event loop is created."""
    runner = asyncio.Runner()
    try:
        with _delayed_interrupt():
            runner.get_loop()
        return runner.run(work())
    finally:
        runner.close()


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Deliver an interrupt to the previous handler at the end of the block."""
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def starting_processes() -> Iterator[None]:
    """Block interrupts in processes started in this block. A terminal signals all processes, and one that is still
    importing would end with a traceback. This process gets the interrupt in another thread or after the block."""
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
