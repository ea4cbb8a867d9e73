"""`Ranks`: starts, watches and stops the follower processes for rank 0."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RankLost
from weft.engine.model.directory import read_spec
from weft.engine.progress import Progress, notice
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.runner.device.compile_job import has_gpu
from weft.engine.wire.child import RANK, command, stacks_signal_blocked
from weft.engine.wire.cores import cores, nodes_here, shares, threads
from weft.engine.wire.exiting import GRACE_SECONDS, LOOK_MS, how_ended, is_exiting
from weft.engine.wire.heartbeat import ENGINE, Heartbeats
from weft.engine.wire.memory_kills import MemoryKills
from weft.engine.wire.preloaded import VISIBLE, environment, gpus
from weft.engine.wire.stacks import Stacks

END_SECONDS = 2.0  # Seconds that a rank gets to exit before it is killed.


def _not_started(config: EngineConfig, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: cannot start a rank: {why}")


def _gpus(config: EngineConfig) -> list[str]:
    """Return the GPUs to spread ranks over, found without loading CUDA; empty on a CPU."""
    return gpus() if config.device != "cpu" and has_gpu() else []


def gpu_environment(config: EngineConfig, rank: int) -> dict[str, str]:
    """Return environment variables for a rank's process: its GPU comes first in the list, then those of the others."""
    here = _gpus(config)
    return {VISIBLE: ",".join(here[rank:] + here[:rank])} if here else {}


class OneRank:
    """Takes the place of `Ranks` without tensor parallelism. config: the configuration that every rank uses."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended."""

    def checked_progress(self, progress: Progress | None) -> Progress:
        """Wrap a progress callback so that each call also runs `check`."""

        def report(phase: str, done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(phase, done, total)

        return report

    def stop(self, _seconds: float = END_SECONDS, /) -> None:
        """Stop the other ranks; kill any still running after the given seconds. Idempotent."""


class Ranks(OneRank):
    """Create with `Ranks.begin(config)` before other slow work, so that all ranks start at once. `links`: rank 0's."""

    def __init__(self, config: EngineConfig, heartbeats: Heartbeats, row: int, stacks_fd: int, *, pin: bool) -> None:
        super().__init__(config)
        self._why: str | None = None
        self._stopping = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._memory_kills = MemoryKills()
        self._ends: dict[int, int] = {}  # By rank: a pidfd, readable once the process has ended.
        self._watcher = threading.Thread(target=self._watch, name="weft-ranks", daemon=True)
        try:
            self._shared = Descriptors.make(config.tensor_parallel_size)
            self._lost = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise _not_started(config, error) from None
        self.links = Links(0, self._shared, self._lost)
        self.links.check = self.check
        parts = shares(os.sched_getaffinity(0), nodes_here(), config.tensor_parallel_size)
        try:
            for rank in self.links.peers:
                self._begin(rank, heartbeats, row, stacks_fd, parts[rank] if parts else set())
        except OSError as error:
            self.stop(0.0)
            raise _not_started(config, error) from None
        if parts and pin:
            os.sched_setaffinity(0, parts[0])
        self._watcher.start()

    def _begin(self, rank: int, heartbeats: Heartbeats, row: int, stacks_fd: int, cpus: set[int]) -> None:
        heartbeat = heartbeats.rank(row, rank)
        heartbeat.begin("starting", heartbeats.start_timeout)
        # With a parent-death signal the kernel kills a child when the thread that created it ends.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        arguments = (rank, heartbeats.fd, row, stacks_fd)
        with stacks_signal_blocked():
            process = self._processes[rank] = subprocess.Popen(
                command(parent, RANK, *arguments),
                stdin=subprocess.PIPE,
                pass_fds=(*self._shared.fds, heartbeats.fd, stacks_fd),
                start_new_session=True,  # so that Ctrl-C reaches only rank 0
                env={**environment(), **gpu_environment(self.config, rank)},
            )
        self._ends[rank] = os.pidfd_open(process.pid)
        heartbeat.begin("starting", heartbeats.start_timeout, process.pid)
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cpus)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{self.config.model_dump_json()}\n{self._shared.dump()}\n".encode())
            process.stdin.flush()

    @classmethod
    def begin(
        cls, config: EngineConfig, heartbeats: Heartbeats | None = None, row: int = ENGINE,
        stacks_fd: int | None = None, *, pin: bool = False,
    ) -> OneRank:  # fmt: skip
        """Start the followers, if any.

        heartbeats, row, stacks_fd: where ranks write heartbeats and stacks; private by default. pin: also pin this
        process to the cores of rank 0. Raises `ConfigError` or `ModelError`."""
        if config.tensor_parallel_size == 1:
            return OneRank(config)
        # Check that the model can be sharded before starting anything.
        if config.model_impl == "transformers":
            raise ConfigError("--tensor-parallel-size needs weft's own layers: leave out --model-impl transformers")
        read_spec(config.model_path).shard(0, config.tensor_parallel_size)
        if (here := _gpus(config)) and len(here) < config.tensor_parallel_size:
            raise ConfigError(
                f"--tensor-parallel-size {config.tensor_parallel_size} needs one GPU per rank, and this machine has "
                f"{len(here)}; lower it, or use --device cpu"
            )
        if here:
            notice("--tensor-parallel-size on GPUs is experimental: it has been tested only on two and four H200s")
        if not here and (there := cores()) < config.tensor_parallel_size:
            ranks = config.tensor_parallel_size
            notice(f"--tensor-parallel-size: {ranks} ranks share {there} core(s): fewer ranks would be faster")
        each = config.cpu_threads or threads(cores(), config.tensor_parallel_size)
        # All ranks must have a pipeline before one of them runs it.
        config = config.for_measuring().model_copy(update={"cpu_threads": each})
        own = Stacks() if stacks_fd is None else None
        return cls(config, heartbeats or Heartbeats(row + 1), row, own.fd if own else stacks_fd or 0, pin=pin)

    def _watch(self) -> None:
        """Thread: report as soon as a rank has ended or is exiting."""
        poll = select.poll()
        ranks = {fd: rank for rank, fd in self._ends.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        while not self._stopping and self._why is None:
            ended = [ranks[fd] for fd, _ in poll.poll(LOOK_MS)]
            if not ended and (ending := [r for r, p in self._processes.items() if is_exiting(p.pid)]):
                ended = [ranks[fd] for fd, _ in poll.poll(int(GRACE_SECONDS * 1e3))] or ending
            if ended and not self._stopping:
                self._why = f"rank {ended[0]}: {self._ended(ended[0])}"
                os.eventfd_write(self._lost, 1)
                self.links.on_lost()

    def _ended(self, rank: int) -> str:
        if why := self.links.state(rank).why:
            return why
        if not select.select([self._ends[rank]], [], [], 0)[0]:
            return "its process ended (its memory is being released)"
        code = self._processes[rank].wait()
        return f"its process ended ({self._memory_kills.explain(how_ended(code))})"

    def check(self) -> None:
        if self._why is not None:
            raise RankLost(self._why)
        if self._stopping:  # a thread that waits for another rank must end too
            raise RankLost("the other ranks have been stopped")

    def stop(self, seconds: float = END_SECONDS) -> None:
        if self._stopping:
            return
        self._stopping = True
        end = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in self._processes.values():  # kill all before waiting for any: releasing memory takes time
            process.kill()
        for process in self._processes.values():
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if self._watcher.is_alive():
            self._watcher.join()
        self._shared.close()
        for fd in (*self._ends.values(), self._lost):
            os.close(fd)
