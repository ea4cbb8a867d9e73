"""`side_by_side`: several engines on one device, each a process with its own weights, measured at the same time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

import msgspec
import numpy as np

from weft.autosearch.advisor.curve import QUANTILES, Point, ReplicaPoint, Times
from weft.engine.bench.options import Lengths
from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError

SETTLING = 4
"""iterations before one of several is measured"""


def side_by_side(
    config: EngineConfig, replicas: int, bound: int, pages: int, lengths: Lengths, seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> ReplicaPoint:  # fmt: skip
    """pages: KV pages of each. Raises `WeftError` when one of them does not start or ends.

    One alone is the measure for several: a process too, with as many pages, at about the same time.
    """
    own: dict[str, Any] = {"num_pages": pages, "kv_cache_gib": None, "max_num_seqs": bound, "slo": []}
    if config.device == "cpu" or config.cpu_threads is not None:
        own["cpu_threads"] = max(1, (config.cpu_threads or len(os.sched_getaffinity(0)) - 1) // replicas)
    told = config.model_copy(update=own).model_dump_json()
    order = {"config": told, "bound": bound, "lengths": lengths, "seconds": seconds}
    children: list[subprocess.Popen[str]] = []
    try:
        for i in range(replicas):  # one after the other: each takes what is left of the GPU
            tell(f"starting engine {i + 1} of {replicas}")
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.autosearch.advisor.side_by_side"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            children.append(child)
            _say(child, json.dumps({**order, "seed": i}))
            _heard(child)
        tell(f"{replicas} engines, {bound} requests each")
        for child in children:
            _say(child, "go")
        points = [msgspec.json.decode(_heard(child), type=Point) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return together(points)


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


def _heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise WeftError(f"an engine of several ended with status {child.wait()}; its reason is above")
    return line


def main() -> int:
    """One of them: an order on stdin, a line when it is ready; then `go`, and what it measured."""
    from weft.autosearch.advisor.engine_bench import EngineBench
    from weft.engine.engine import Engine

    order = json.loads(sys.stdin.readline())
    told: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints is no answer
    try:
        engine = Engine(EngineConfig.model_validate_json(order["config"]).for_measuring())
    except WeftError as error:
        print(f"weft advise: {error}", file=sys.stderr, flush=True)
        return 1
    lengths = [(int(p), int(d)) for p, d in order["lengths"]]
    bench = EngineBench(engine, lengths, order["seconds"], order["seed"])
    bench.ready(order["bound"])
    print("ready", file=told, flush=True)
    if not sys.stdin.readline():
        os._exit(0)
    for _ in range(SETTLING):  # the device had nothing to do while this one waited
        bench.run(order["bound"])
    point = bench.measure(order["bound"])
    print(msgspec.json.encode(point).decode(), file=told, flush=True)
    # The others may still measure: none is left alone before whoever asked ends all of them, or ends itself.
    while not select.select([0], [], [], 0)[0]:
        bench.run(order["bound"])
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
