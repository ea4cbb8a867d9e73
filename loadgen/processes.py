"""Runs jobs in separate processes, so that drawing progress cannot delay requests.

Delays Ctrl-C in places where an exception would leave half-built objects that fail in their destructors.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from weft.loadgen.driver import Driver, Job, Outcomes, Progress
from weft.loadgen.errors import LoadError

HEAD_START = 0.1  # Seconds between the last process becoming ready and second zero.

OnProgress = Callable[[float, Sequence[Progress]], None]
"""Called with the seconds since the start and the totals of each process."""
T = TypeVar("T")


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like `asyncio.run(work())`, but delays an interrupt that arrives while the event loop is created."""
    received: list[int] = []
    runner = asyncio.Runner()
    try:
        previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
        try:
            runner.get_loop()
        finally:
            signal.signal(signal.SIGINT, previous)
        if received:
            signal.raise_signal(signal.SIGINT)
        return runner.run(work())
    finally:
        runner.close()


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


class _Worker:
    """A process that runs a job. It has one pipe per direction: watching a pipe in an event loop makes it non-blocking
    for writers, too."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.results, results = context.Pipe(duplex=False)
        orders, self.orders = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(job, orders, results), daemon=True)
        self.process.start()
        orders.close()
        results.close()

    def receive(self) -> Any:
        try:
            return self.results.recv()
        except (EOFError, OSError):
            raise LoadError("a process of the load generator died; its message is above") from None


def run_jobs(jobs: Sequence[Job], on_progress: OnProgress | None = None) -> list[Outcomes]:
    """Run each job in a process, with a common second zero, and wait for them.

    An interrupt (Ctrl-C) ends the run early and keeps the measurements; a second one aborts it. Raises `LoadError` if a
    process dies."""
    workers: list[_Worker] = []
    interrupts = 0

    def interrupt(*_: Any) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        _broadcast(workers, "stop")

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with starting_processes():
            for job in jobs:
                workers.append(_Worker(job))
        if interrupts:
            _broadcast(workers, "stop")  # include processes started after the interrupt
        for worker in workers:
            worker.receive()
        epoch = time.monotonic() + HEAD_START
        _broadcast(workers, epoch)
        return _collect(workers, epoch, on_progress)
    finally:
        signal.signal(signal.SIGINT, previous)
        for worker in workers:
            worker.results.close()
            worker.orders.close()
        for worker in workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()


def _broadcast(workers: Sequence[_Worker], what: float | str) -> None:
    for worker in workers:
        with suppress(OSError):  # the process has ended; its results or EOF are in its pipe
            worker.orders.send(what)


def _collect(workers: Sequence[_Worker], epoch: float, on_progress: OnProgress | None) -> list[Outcomes]:
    totals = [Progress() for _ in workers]
    outcomes: dict[int, Outcomes] = {}
    while len(outcomes) < len(workers):
        ready = wait([worker.results for i, worker in enumerate(workers) if i not in outcomes], timeout=0.5)
        for i, worker in enumerate(workers):
            if worker.results in ready:
                message = worker.receive()
                if isinstance(message, Outcomes):
                    outcomes[i] = message
                else:
                    totals[i] = message
        if on_progress is not None:
            on_progress(time.monotonic() - epoch, totals)
    return [outcomes[i] for i in range(len(workers))]


def _work(job: Job, orders: Connection, results: Connection) -> None:
    """Run a job; the main function of a process."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with suppress(OSError):  # needs root; reduces lateness next to a busy server
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    # Garbage collection would pause every stream; records hold no cycles.
    gc.collect()
    gc.disable()
    results.send("ready")
    with suppress(EOFError, BrokenPipeError):  # the parent is gone
        epoch = orders.recv()
        if epoch == "stop":
            results.send(Outcomes(interrupted=True))
        else:
            uvloop.run(_drive(replace(job, epoch=epoch), orders, results))


async def _drive(job: Job, orders: Connection, results: Connection) -> None:
    driver = Driver(job, results.send)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(orders.fileno())
        driver.stop()

    loop.add_reader(orders.fileno(), stop)  # any message from the parent, or its end
    outcomes = await driver.run()
    loop.remove_reader(orders.fileno())
    results.send(outcomes)
