"""`ConcurrentEngines`: several engine processes on one device with shared weights, measured concurrently."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Self

import msgspec
import numpy as np

from weft.autosearch.advisor.curve import QUANTILES, Point, ReplicaPoint, Times
from weft.autosearch.workload import Lengths
from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.wire.child import settle
from weft.engine.wire.weight_exchange import WeightExchange

REPLY_SECONDS = 90.0  # Time limit for a reply. An engine that hangs thus ends the measurement early.
START_SECONDS = 600.0
WARMUP_ITERATIONS = 4
POLL_SECONDS = 0.2  # Interval to check whether the user has ended the measurement.


class EndedEarly(WeftError):
    """The user ended the measurement."""


class ConcurrentEngines:
    """Starts the engines once, then measures any number of them at any slot limit while the others are idle.

    The baseline of several engines is one of them alone: also a process, with equally many pages."""

    def __init__(
        self, config: EngineConfig, most: int, bound: int, pages: int, lengths: Lengths, seconds: float,
        progress: Callable[[str], None] = lambda _: None, stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """most: number of engines. bound: largest slot limit. pages: KV pages per engine.

        Raises `WeftError` if an engine does not start."""
        own: dict[str, Any] = {"num_pages": pages, "kv_cache_gib": None, "max_num_seqs": bound, "slo": []}
        if config.device == "cpu" or config.cpu_threads is not None:
            own["cpu_threads"] = max(1, (config.cpu_threads or len(os.sched_getaffinity(0)) - 1) // most)
        engine_config = config.model_copy(update=own).model_dump_json()
        self._progress, self._stop_requested = progress, stop_requested
        self._measure_seconds = REPLY_SECONDS + 20 * seconds  # `engine_bench.MAX_EXTENSION`
        self._children: list[subprocess.Popen[str]] = []
        self._exchange = WeightExchange()
        try:
            for i in range(most):
                progress(f"starting engine {i + 1} of {most}")
                child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "weft.autosearch.advisor.concurrent_engines", str(os.getpid())],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=self._exchange.fds,
                    start_new_session=True,  # Ctrl-C reaches only the command, which then ends them
                )  # fmt: skip
                self._children.append(child)
                setup = {"config": engine_config, "lengths": lengths, "seconds": seconds, "seed": i}
                _send(child, json.dumps({**setup, "exchange": self._exchange.fds}))
            for child in self._children:
                self._receive(child, START_SECONDS)
        except BaseException:
            self.close()
            raise

    def measure(self, number: int, bound: int) -> ReplicaPoint:
        """Measure `number` engines at this slot limit each. Raises `EndedEarly`, or `WeftError` if one of them ends."""
        self._check_stop()
        children = self._children[:number]
        self._call(children, f"ready {bound}", REPLY_SECONDS)
        self._progress(f"{number} engines, {bound} requests each")
        points = self._call(children, f"measure {bound}", self._measure_seconds)
        self._call(children, "drop 0", REPLY_SECONDS)
        return combine([msgspec.json.decode(point, type=Point) for point in points])

    def _call(self, children: list[subprocess.Popen[str]], command: str, seconds: float) -> list[str]:
        for child in children:
            _send(child, command)
        return [self._receive(child, seconds) for child in children]

    def _check_stop(self) -> None:
        if self._stop_requested():
            raise EndedEarly("ended before the engines were measured")

    def _receive(self, child: subprocess.Popen[str], seconds: float) -> str:
        """Read a reply line. Raises `WeftError` if the process has ended or does not reply within `seconds`."""
        assert child.stdout is not None
        until = time.monotonic() + seconds
        while not select.select([child.stdout], [], [], POLL_SECONDS)[0]:  # one reply per command: none is buffered
            self._check_stop()
            if time.monotonic() > until:
                raise WeftError(f"a concurrent engine made no progress for {seconds:.0f} s")
        line = child.stdout.readline()
        if not line:
            raise WeftError(f"a concurrent engine ended with status {child.wait()}; see its error above")
        return line

    def close(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        self._exchange.clear()
        self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def combine(points: list[Point]) -> ReplicaPoint:
    """Combine the points of concurrent engines. Percentiles come from the mixture, weighted by tokens."""
    weights = np.array([p.output_per_s for p in points])
    seconds = np.sort(np.concatenate([p.itl.quantiles for p in points]))
    below = sum(
        w * np.interp(seconds, p.itl.quantiles, np.array(QUANTILES), left=0.0, right=100.0)
        for w, p in zip(weights, points, strict=True)
    ) / float(weights.sum())
    itl = Times(
        float(np.average([p.itl.mean or 0.0 for p in points], weights=weights)),
        tuple(float(v) for v in np.interp(QUANTILES, below, seconds)),
    )
    return ReplicaPoint(
        replicas=len(points), bound=points[0].bound, batch=sum(p.batch for p in points),
        output_per_s=float(weights.sum()), itl=itl, idle_share=float(np.mean([p.idle_share for p in points])),
    )  # fmt: skip


def _send(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise WeftError(f"a concurrent engine ended with status {child.wait()}; see its error above") from None


def main() -> int:
    """Run one engine for the parent process given as argument.

    Reads a setup line on stdin and replies once the engine is up. Then replies to each `ready`, `measure` and `drop`.
    """
    settle(int(sys.argv[1]))
    from weft.autosearch.advisor.engine_bench import EngineBench
    from weft.engine.engine import Engine

    setup = json.loads(sys.stdin.readline())
    replies: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with replies
    try:
        config = EngineConfig.model_validate_json(setup["config"]).for_measuring()
        engine = Engine(config, exchange=WeightExchange.of(setup["exchange"]))
    except WeftError as error:
        print(f"weft advise: {error}", file=sys.stderr, flush=True)
        return 1
    lengths = [(int(p), int(d)) for p, d in setup["lengths"]]
    bench = EngineBench(engine, lengths, setup["seconds"], setup["seed"])
    print("started", file=replies, flush=True)
    while line := sys.stdin.readline():
        verb, bound = line.split()[0], int(line.split()[1])
        if verb == "ready":
            bench.ready(bound)
            print(verb, file=replies, flush=True)
        elif verb == "measure":
            for _ in range(WARMUP_ITERATIONS):  # the engine was idle while others got ready
                bench.run(bound)
            print(msgspec.json.encode(bench.measure(bound)).decode(), file=replies, flush=True)
            # keep the device busy while the other engines measure
            while not select.select([0], [], [], 0)[0]:
                bench.run(bound)
        else:
            bench.drop()
            print(verb, file=replies, flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
