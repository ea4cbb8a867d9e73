"""`RanksBench`: the `Bench` of several GPUs: rank 0's, with a process for each of the others that measures the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from weft.autosearch.bench_follower import Asked, Opening, measure, open_rank
from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RankLost
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.ranks.group import gpu_environment
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.wire.preloaded import environment

END_SECONDS = 2.0
"""that a rank gets to end when its stdin has"""
MODULE = "weft.autosearch.bench_follower"


class RanksBench:
    """See `SumsBench`. Watts and clocks are the mean of all GPUs'; times are alike on all: they wait for each other.

    Raises, as all its methods do, `RankLost` when another rank has ended.
    """

    def __init__(
        self, model: Path, ranks: int, *, max_tokens: int, max_context: int, seconds: float, tuning_seconds: float,
        progress: Callable[[str], None] = lambda _: None,
        open_own: Callable[[Links, Opening, Callable[[str], None]], Bench] = open_rank,
        module: str = "", device: str = "cuda",
    ) -> None:  # fmt: skip
        """model: folder of the whole one. open_own: makes rank 0's bench. module: what the other ranks run."""
        self._module, self._device = module or MODULE, device
        self._why: str | None = None
        self._closing = False
        self._followers: dict[int, subprocess.Popen[bytes]] = {}
        self._shared = Descriptors.make(ranks)
        self._lost = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links = Links(0, self._shared, self._lost)
        self._links.check = self._check
        opening = Opening(str(model), self._shared.dump(), max_tokens, max_context, seconds, tuning_seconds)
        try:
            for rank in self._links.peers:
                self._begin(rank, opening)
            self._own = open_own(self._links, opening, progress)
        except BaseException:
            self.close()
            raise
        self._links.on_lost = getattr(self._own, "end_waiting", lambda: None)
        self.num_sms, self.memory = self._own.num_sms, self._own.memory
        self._check()

    def _begin(self, rank: int, opening: Opening) -> None:
        # The kernel ends a child with the thread that made it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        options = {"tensor_parallel_size": self._links.ranks, **({"device": "cpu"} if self._device == "cpu" else {})}
        config = EngineConfig.model_validate(options)
        try:
            process = self._followers[rank] = subprocess.Popen(
                (sys.executable, "-P", "-m", self._module, str(rank), str(parent)),
                stdin=subprocess.PIPE,
                pass_fds=self._shared.fds,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone
                env={**environment(), **gpu_environment(config, rank)},
            )
        except OSError as error:
            raise ConfigError(f"--tensor-parallel-size: cannot start a rank: {error.strerror or error}") from None
        threading.Thread(target=self._watch, args=(rank, process), name="weft-ranks", daemon=True).start()
        self._tell(process, opening)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread: end what waits for a rank that has ended."""
        code = process.wait()
        if not self._closing:
            self._why = f"rank {rank}: {self._links.state(rank).why or f'its process ended (status {code})'}"
            os.eventfd_write(self._lost, 1)
            self._links.on_lost()

    def _check(self) -> None:
        if self._why is not None:
            raise RankLost(self._why)

    def _tell(self, process: subprocess.Popen[bytes], what: msgspec.Struct) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_watch` gpu_environment
            process.stdin.write(msgspec.json.encode(what) + b"\n")
            process.stdin.flush()

    def _measure(self, asked: Asked) -> tuple[Timing, ...]:
        self._check()
        for process in self._followers.values():
            self._tell(process, asked)
        found = measure(self._own, asked)
        self._check()  # what was measured while a rank ended is no measurement
        return found

    @property
    def seconds(self) -> float:
        return self._own.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._measure(Asked("seconds", seconds=value))

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        return self._measure(Asked("alone", (op,), load=load))[0]

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        first, second = self._measure(Asked("pair", (a, b), load=load))
        return first, second

    def period(self, period: Period, load: Load) -> Timing:
        return self._measure(Asked("period", period=period, load=load))[0]

    def sums(self, way: str) -> None:
        """See `SumsBench`."""
        self._measure(Asked("sums", way=way))

    def close(self) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        for process in self._followers.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
        if own := getattr(self, "_own", None):
            getattr(own, "close", lambda: None)()
        self._shared.close()
        os.close(self._lost)
