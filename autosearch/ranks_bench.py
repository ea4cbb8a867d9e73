"""`RanksBench`: the `Bench` of several GPUs: rank 0 in this process, and a process for each follower."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from weft.autosearch.bench_follower import BenchConfig, MeasureRequest, measure, open_rank
from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RankLost
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.ranks.group import gpu_environment
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.wire.preloaded import environment

END_SECONDS = 2.0  # Seconds to wait for a follower to exit after its stdin is closed.
MODULE = "weft.autosearch.bench_follower"


class RanksBench:
    """Implements `ReductionBench`. Watts and clocks are means over all GPUs. Times agree, since ranks synchronize.

    The constructor and all methods raise `RankLost` if another rank has ended."""

    def __init__(
        self, model: Path, ranks: int, *, max_tokens: int, max_context: int, seconds: float, tuning_seconds: float,
        progress: Callable[[str], None] = lambda _: None,
        open_own: Callable[[Links, BenchConfig, Callable[[str], None]], Bench] = open_rank,
        module: str = "", device: str = "cuda",
    ) -> None:  # fmt: skip
        """model: folder of the unsharded model. open_own: opens rank 0's bench. module: the followers' module."""
        self._module, self._device = module or MODULE, device
        self._why: str | None = None
        self._closing = False
        self._followers: dict[int, subprocess.Popen[bytes]] = {}
        self._shared = Descriptors.make(ranks)
        self._lost = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links = Links(0, self._shared, self._lost)
        self._links.check = self._check
        opening = BenchConfig(str(model), self._shared.dump(), max_tokens, max_context, seconds, tuning_seconds)
        try:
            for rank in self._links.peers:
                self._start(rank, opening)
            self._own = open_own(self._links, opening, progress)
        except BaseException:
            self.close()
            raise
        self._links.on_lost = getattr(self._own, "abort_waits", lambda: None)
        self.num_sms, self.memory = self._own.num_sms, self._own.memory
        self._check()

    def _start(self, rank: int, opening: BenchConfig) -> None:
        # The kernel ends a child when the thread that created it ends.
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
        self._send(process, opening)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread: abort waits for a rank that has ended."""
        code = process.wait()
        if not self._closing:
            self._why = f"rank {rank}: {self._links.state(rank).why or f'its process ended (status {code})'}"
            os.eventfd_write(self._lost, 1)
            self._links.on_lost()

    def _check(self) -> None:
        if self._why is not None:
            raise RankLost(self._why)

    def _send(self, process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_watch` notices
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()

    def _measure(self, request: MeasureRequest) -> tuple[Timing, ...]:
        self._check()
        for process in self._followers.values():
            self._send(process, request)
        found = measure(self._own, request)
        self._check()  # a measurement during which a rank ended is invalid
        return found

    @property
    def seconds(self) -> float:
        return self._own.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._measure(MeasureRequest("seconds", seconds=value))

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        return self._measure(MeasureRequest("alone", (op,), load=load))[0]

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        first, second = self._measure(MeasureRequest("pair", (a, b), load=load))
        return first, second

    def period(self, period: Period, load: Load) -> Timing:
        return self._measure(MeasureRequest("period", period=period, load=load))[0]

    def sums(self, reduction: str) -> None:
        self._measure(MeasureRequest("sums", reduction=reduction))

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
