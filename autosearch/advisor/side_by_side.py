"""`SideBySide`: several engines on one device, each a process, with one set of weights, measured at the same time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import numpy as np

from weft.autosearch.advisor.curve import QUANTILES, Point, ReplicaPoint, Times
from weft.autosearch.workload import Lengths
from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.wire.child import settle
from weft.engine.wire.weight_exchange import WeightExchange

PATIENCE_SECONDS = 90.0
"""for an answer: an engine that hangs ends the measurement, not the time for it"""
START_SECONDS = 600.0
SETTLING = 4
"""iterations before one of several is measured"""
LOOK_SECONDS = 0.2
"""between two looks at whether somebody has ended it"""


class Ended(WeftError):
    """Somebody wanted what there was by then."""


class SideBySide:
    """Started once, measured in any number and at any bound: those that are not asked for rest.

    One alone is the measure for several: a process too, with as many pages, at about the same time.
    """

    def __init__(
        self, config: EngineConfig, most: int, bound: int, pages: int, lengths: Lengths, seconds: float,
        tell: Callable[[str], None] = lambda _: None, ended: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """most: engines; bound: the largest; pages: KV pages of each. ended: somebody wants an end.

        Raises `WeftError` when one does not start.
        """
        own: dict[str, Any] = {"num_pages": pages, "kv_cache_gib": None, "max_num_seqs": bound, "slo": []}
        if config.device == "cpu" or config.cpu_threads is not None:
            own["cpu_threads"] = max(1, (config.cpu_threads or len(os.sched_getaffinity(0)) - 1) // most)
        told = config.model_copy(update=own).model_dump_json()
        self._tell, self._ended, self._patience = tell, ended, PATIENCE_SECONDS + 20 * seconds  # `engine_bench.LONGEST`
        self._children: list[subprocess.Popen[str]] = []
        self._exchange = WeightExchange()
        try:
            for i in range(most):
                tell(f"starting engine {i + 1} of {most}")
                child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "weft.autosearch.advisor.side_by_side", str(os.getpid())],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=self._exchange.fds,
                    start_new_session=True,  # Ctrl-C reaches the command alone, which then ends them
                )  # fmt: skip
                self._children.append(child)
                order = {"config": told, "lengths": lengths, "seconds": seconds, "seed": i, "exchange": self._exchange.fds}
                _say(child, json.dumps(order))
            for child in self._children:
                self._heard(child, START_SECONDS)
        except BaseException:
            self.close()
            raise

    def measure(self, number: int, bound: int) -> ReplicaPoint:
        """So many of them, each with this bound. Raises `WeftError` when one of them ends, `Ended`."""
        self._check_ended()
        working = self._children[:number]
        for child in working:
            _say(child, f"ready {bound}")
        for child in working:
            self._heard(child, PATIENCE_SECONDS)
        self._tell(f"{number} engines, {bound} requests each")
        for child in working:
            _say(child, f"measure {bound}")
        points = [msgspec.json.decode(self._heard(child, self._patience), type=Point) for child in working]
        for child in working:
            _say(child, "rest 0")
        for child in working:
            self._heard(child, PATIENCE_SECONDS)
        return together(points)

    def _check_ended(self) -> None:
        if self._ended():
            raise Ended("ended before they were measured")

    def _heard(self, child: subprocess.Popen[str], seconds: float) -> str:
        """Its answer, a line. Raises `WeftError` when it has ended, or says nothing for so long."""
        assert child.stdout is not None
        until = time.monotonic() + seconds
        while not select.select([child.stdout], [], [], LOOK_SECONDS)[0]:  # it answers once: no line is read already
            self._check_ended()
            if time.monotonic() > until:
                raise WeftError(f"an engine of several made no progress for {seconds:.0f} s beside the others")
        line = child.stdout.readline()
        if not line:
            raise WeftError(f"an engine of several ended with status {child.wait()}; its reason is above")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def together(points: list[Point]) -> ReplicaPoint:
    """What engines did at the same time. Percentiles of all are read off a mixture, by the tokens of each."""
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


def _say(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise WeftError(f"an engine of several ended with status {child.wait()}; its reason is above") from None


def main() -> int:
    """One of them, started by the process of the number it is given: an order on stdin, a line when it is there; then
    `ready`, `measure` and `rest`, each answered."""
    settle(int(sys.argv[1]))
    from weft.autosearch.advisor.engine_bench import EngineBench
    from weft.engine.engine import Engine

    order = json.loads(sys.stdin.readline())
    told: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints is no answer
    try:
        config = EngineConfig.model_validate_json(order["config"]).for_measuring()
        engine = Engine(config, exchange=WeightExchange.of(order["exchange"]))
    except WeftError as error:
        print(f"weft advise: {error}", file=sys.stderr, flush=True)
        return 1
    lengths = [(int(p), int(d)) for p, d in order["lengths"]]
    bench = EngineBench(engine, lengths, order["seconds"], order["seed"])
    print("there", file=told, flush=True)
    while line := sys.stdin.readline():
        verb, bound = line.split()[0], int(line.split()[1])
        if verb == "ready":
            bench.ready(bound)
            print(verb, file=told, flush=True)
        elif verb == "measure":
            for _ in range(SETTLING):  # the device had nothing to do while this one waited
                bench.run(bound)
            print(msgspec.json.encode(bench.measure(bound)).decode(), file=told, flush=True)
            # The others may still measure: none is left alone before whoever asked says so, or ends.
            while not select.select([0], [], [], 0)[0]:
                bench.run(bound)
        else:
            bench.drop()
            print(verb, file=told, flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
