"""Runs jobs in separate processes, so that drawing progress cannot delay requests."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from weft.loadgen.driver import Driver, Job, Outcomes, Progress
from weft.loadgen.errors import LoadError
from weft.loadgen.interrupts import starting_processes

HEAD_START = 0.1
"""Seconds between the last process becoming ready and second zero."""

OnProgress = Callable[[float, Sequence[Progress]], None]
"""Called with the seconds since the start and the totals of each process."""


def run_jobs(jobs: Sequence[Job], on_progress: OnProgress | None = None) -> list[Outcomes]:
    """Run each job in a process, with a common second zero, and wait for them.

    An interrupt (Ctrl-C) ends the run early and keeps the measurements; a second one aborts it. Raises `LoadError` if a
    process dies.
    """
    pipes: list[Connection] = []
    orders: list[Connection] = []
    workers: list[SpawnProcess] = []
    interrupts = 0

    def interrupt(*_: Any) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        _broadcast(orders, "stop")

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with starting_processes():
            for job in jobs:
                _start(job, pipes, orders, workers)
        if interrupts:
            _broadcast(orders, "stop")  # include processes started after the interrupt
        for pipe in pipes:
            _receive(pipe)
        epoch = time.monotonic() + HEAD_START
        _broadcast(orders, epoch)
        return _collect(pipes, epoch, on_progress)
    finally:
        signal.signal(signal.SIGINT, previous)
        for pipe in (*pipes, *orders):
            pipe.close()
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()


def _start(job: Job, pipes: list[Connection], orders: list[Connection], workers: list[SpawnProcess]) -> None:
    # Use one pipe per direction: watching a pipe in an event loop makes it non-blocking for writers, too.
    context = multiprocessing.get_context("spawn")
    ours, results = context.Pipe(duplex=False)
    commands, order = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(job, commands, results), daemon=True)
    worker.start()
    commands.close()
    results.close()
    pipes.append(ours)
    orders.append(order)
    workers.append(worker)


def _broadcast(orders: Sequence[Connection], what: float | str) -> None:
    for order in orders:
        with suppress(OSError):  # the process has ended; its results or EOF are in its pipe
            order.send(what)


def _collect(pipes: Sequence[Connection], epoch: float, on_progress: OnProgress | None) -> list[Outcomes]:
    totals = [Progress() for _ in pipes]
    outcomes: dict[int, Outcomes] = {}
    while len(outcomes) < len(pipes):
        for pipe in wait([p for i, p in enumerate(pipes) if i not in outcomes], timeout=0.5):
            assert isinstance(pipe, Connection)
            i = pipes.index(pipe)
            message = _receive(pipe)
            if isinstance(message, Outcomes):
                outcomes[i] = message
            else:
                totals[i] = message
        if on_progress is not None:
            on_progress(time.monotonic() - epoch, totals)
    return [outcomes[i] for i in range(len(pipes))]


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise LoadError("a process of the load generator died; its message is above") from None


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
    try:
        epoch = orders.recv()
        if epoch == "stop":
            results.send(Outcomes(interrupted=True))
            return
        uvloop.run(_drive(replace(job, epoch=epoch), orders, results))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone


async def _drive(job: Job, orders: Connection, results: Connection) -> None:
    driver = Driver(job, results.send)
    # Any message from the parent, or its end, means stop.
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(orders.fileno())
        driver.stop()

    loop.add_reader(orders.fileno(), stop)
    outcomes = await driver.run()
    loop.remove_reader(orders.fileno())
    results.send(outcomes)
