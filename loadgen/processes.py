"""Runs jobs in processes of their own, so that drawing the progress of a run cannot delay its requests."""

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
"""seconds between the last process being ready and second zero"""

OnProgress = Callable[[float, Sequence[Progress]], None]
"""called with the seconds since the start, and the totals of each process"""


def run_jobs(jobs: Sequence[Job], on_progress: OnProgress | None = None) -> list[Outcomes]:
    """Run each job in a process, all with one second zero, and wait for them.

    An interrupt (Ctrl-C) ends the run early and keeps what was measured; a second one ends it at once.
    Raises `LoadError` when a process dies.
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
        _tell(orders, "stop")

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with starting_processes():
            for job in jobs:
                _start(job, pipes, orders, workers)
        if interrupts:
            _tell(orders, "stop")  # those, too, that did not live when it came
        for pipe in pipes:
            _receive(pipe)
        epoch = time.monotonic() + HEAD_START
        _tell(orders, epoch)
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
    # One pipe each way: an event loop that watches a pipe makes it non-blocking, for those who write as well.
    context = multiprocessing.get_context("spawn")
    ours, results = context.Pipe(duplex=False)
    told, order = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(job, told, results), daemon=True)
    worker.start()
    told.close()
    results.close()
    pipes.append(ours)
    orders.append(order)
    workers.append(worker)


def _tell(orders: Sequence[Connection], what: float | str) -> None:
    for order in orders:
        with suppress(OSError):  # that process has ended: what it measured, or that there is nothing, is in its pipe
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
    """The body of a process."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with suppress(OSError):  # only root may; then a busy server beside us makes us less late
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    # A collection of garbage would be a pause of ours in every stream; records hold no cycles.
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
    # Whatever the parent says, or its end, means stop.
    loop = asyncio.get_running_loop()

    def told() -> None:
        loop.remove_reader(orders.fileno())
        driver.stop()

    loop.add_reader(orders.fileno(), told)
    outcomes = await driver.run()
    loop.remove_reader(orders.fileno())
    results.send(outcomes)
