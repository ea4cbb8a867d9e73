"""`Ranks`: the other ranks from the side of rank 0: starts them, knows when one ends, ends them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RankLost
from weft.engine.model.directory import read_spec
from weft.engine.progress import Progress
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.wire.beat import ENGINE, Beats
from weft.engine.wire.child import Stacks
from weft.engine.wire.cores import cores, nodes_here, shares, threads

END_SECONDS = 2.0
"""that a rank gets to end when told"""


class Ranks:
    """Create with `Ranks.begin(config)`, before anything else that takes long: all ranks start at once.

    Attributes:
    config: what every rank works with.
    links: rank 0's.
    """

    def __init__(self, config: EngineConfig, beats: Beats, row: int, stacks_fd: int, *, pin: bool) -> None:
        ranks = config.tensor_parallel_size
        self.config = config
        self._shared = Descriptors.make(ranks)
        self._lost = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._why: str | None = None
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch, name="weft-ranks", daemon=True)
        self.links = Links(0, self._shared, self._lost)
        self.links.check = self.check
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        cpus = os.sched_getaffinity(0)
        parts = shares(cpus, nodes_here(), ranks)
        # The kernel ends a child with the thread that made it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        fds = (*self._shared.fds, beats.fd, stacks_fd)
        lines = f"{config.model_dump_json()}\n{self._shared.dump()}\n".encode()
        try:
            for rank in self.links.peers:
                beat = beats.rank(row, rank)
                beat.begin(beats.start_timeout)
                arguments = map(str, (rank, parent, beats.fd, row, stacks_fd))
                process = self._processes[rank] = subprocess.Popen(
                    (sys.executable, "-P", "-m", "weft.engine.ranks.process", *arguments),
                    stdin=subprocess.PIPE,
                    pass_fds=fds,
                    start_new_session=True,
                )
                beat.begin(beats.start_timeout, process.pid)
                if parts:
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(process.pid, parts[rank])
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(lines)
                    process.stdin.flush()
        except OSError as error:
            self._watcher.start()
            self.stop(0.0)
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: no process can be started: {error.strerror or error}"
            ) from None
        if parts and pin:
            os.sched_setaffinity(0, parts[0])
        self._watcher.start()

    @classmethod
    def begin(
        cls,
        config: EngineConfig,
        beats: Beats | None = None,
        row: int = ENGINE,
        stacks_fd: int | None = None,
        *,
        pin: bool = False,
    ) -> Ranks | None:
        """None for a model that one rank has whole.

        beats, row, stacks_fd: where ranks show that they live, and write their stacks; by default nobody looks. pin:
        this process too is for one rank alone. Raises `ConfigError` or `ModelError`.
        """
        if config.tensor_parallel_size == 1:
            return None
        # What cannot be cut starts nothing.
        if config.model_impl == "transformers":
            raise ConfigError("--tensor-parallel-size needs weft's own layers: leave out --model-impl transformers")
        read_spec(config.model_path).shard(0, config.tensor_parallel_size)
        each = config.cpu_threads or threads(cores(), config.tensor_parallel_size)
        config = config.model_copy(update={"cpu_threads": each})
        own = Stacks() if stacks_fd is None else None
        return cls(config, beats or Beats(row + 1), row, own.fd if own else stacks_fd or 0, pin=pin)

    def _watch(self) -> None:
        """On a thread: say at once when one has ended."""
        poll = select.poll()
        pids: dict[int, int] = {}
        for rank, process in self._processes.items():
            with contextlib.suppress(ProcessLookupError):
                pids[os.pidfd_open(process.pid)] = rank
        for fd in pids:
            poll.register(fd, select.POLLIN)
        while not self._stopping and self._why is None:
            ended = [pids[fd] for fd, _ in poll.poll(500)]
            if ended and not self._stopping:
                self._why = f"rank {ended[0]}: {self._ended(ended[0])}"
                os.eventfd_write(self._lost, 1)
        for fd in pids:
            os.close(fd)

    def _ended(self, rank: int) -> str:
        if why := self.links.state(rank).why:
            return why
        code = self._processes[rank].wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"its process ended ({how})"

    def check(self) -> None:
        """Raises `RankLost` when a rank has ended."""
        if self._why is not None:
            raise RankLost(self._why)

    def watched(self, progress: Progress | None) -> Progress:
        """Rank 0's progress, and news of the others with every part of it."""

        def told(phase: str, done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(phase, done, total)

        return told

    def stop(self, seconds: float = END_SECONDS) -> None:
        """End those that have not ended by themselves within so many seconds. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        end = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._watcher.join()
        self._shared.close()
        os.close(self._lost)
