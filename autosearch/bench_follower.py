"""A follower rank of a bench on several GPUs: `python -m weft.autosearch.bench_follower RANK PARENT`.

PARENT is the process id of rank 0; 0 disables parent-death tracking. Stdin has one JSON document per line: a
`BenchConfig`, then `MeasureRequest`s, which all ranks measure together. The process ends with stdin.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from weft.autosearch.bench_protocol import Bench, Load, ReductionBench, Timing
from weft.engine.config import EngineConfig
from weft.engine.errors import RankLost, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.wire.child import settle

if TYPE_CHECKING:
    from weft.autosearch.gpu_bench import GpuBench


class BenchConfig(msgspec.Struct, frozen=True):
    """The configuration of every rank's bench."""

    model: str  # Folder of the unsharded model.
    descriptors: str
    max_tokens: int
    max_context: int
    seconds: float
    tuning_seconds: float  # Time limit for tuning GEMMs on rank 0. The other ranks read the result.


class MeasureRequest(msgspec.Struct, frozen=True):
    """A call of the `Bench` method `what`, or new `seconds` or `sums` for later measurements."""

    what: Literal["alone", "pair", "period", "seconds", "sums"]
    operations: tuple[NanoOperation, ...] = ()
    period: Period | None = None
    load: Load | None = None
    seconds: float = 0.0
    reduction: str = ""


def measure(bench: Bench, request: MeasureRequest) -> tuple[Timing, ...]:
    """Execute a request. Raises the errors of the bench."""
    if request.what == "seconds":
        bench.seconds = request.seconds
        return ()
    if request.what == "sums":
        assert isinstance(bench, ReductionBench)
        bench.sums(request.reduction)
        return ()
    assert request.load is not None
    if request.what == "period":
        assert request.period is not None
        return (bench.period(request.period, request.load),)
    if request.what == "alone":
        return (bench.alone(request.operations[0], request.load),)
    first, second = request.operations
    return bench.pair(first, second, request.load)


def follow(bench: Bench, lines: Iterable[bytes]) -> None:
    """Execute requests until `lines` end. Failed measurements are ignored, because they fail on rank 0 too."""
    for line in lines:
        try:
            measure(bench, msgspec.json.decode(line, type=MeasureRequest))
        except RankLost:
            raise
        except (WeftError, ValueError):
            continue


def open_rank(
    links: Links, config: BenchConfig, progress: Callable[[str], None] = lambda _: None,
    make: type[GpuBench] | None = None,
) -> GpuBench:  # fmt: skip
    """Open the bench of one rank; all ranks do so together. Rank 0 tunes GEMMs and the others read its results.

    make: class of the bench (default: `GpuBench`). Raises `ConfigError`, `ModelError`, `OutOfMemory` or `RankLost`."""
    import torch

    from weft.engine.ranks.shared_collectives import SharedCollectives

    host, spec = SharedCollectives(links), read_spec(Path(config.model)).shard(links.rank, links.ranks)
    from weft.autosearch.gpu_bench import GpuBench
    from weft.engine.runner.start.gemm_tuning import tune_gemms

    cache, device = EngineConfig.model_validate({}).cache_path, torch.device("cuda", torch.cuda.current_device())

    def report(phase: str, done: int, total: int) -> None:
        links.check()
        progress(f"{phase}, {done} of {total}")

    def tune(seconds: float) -> None:
        tune_gemms(spec, device, config.max_tokens, cache, seconds, report)

    if links.rank == 0:
        tune(config.tuning_seconds)
    host.all_gather(torch.tensor([1]))  # barrier: rank 0 has stored its results
    if links.rank != 0:
        tune(0.0)
    return (make or GpuBench)(
        spec, max_tokens=config.max_tokens, max_context=config.max_context, seconds=config.seconds, host=host
    )  # fmt: skip


def lines_of_stdin() -> Iterable[bytes]:
    """Return lines of stdin, read on a thread. The process exits when stdin ends, even during a measurement."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="weft-stdin", daemon=True).start()
    return iter(lines.get, None)


def main(open_bench: Callable[[Links, BenchConfig], Bench] = open_rank) -> int:
    """Follow rank 0 until stdin ends, on the bench that `open_bench` returns."""
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    settle(parent or None)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=BenchConfig)
    links = Links(rank, Descriptors.load(config.descriptors))
    state = links.state(rank)
    try:
        follow(open_bench(links, config), lines_of_stdin())
    except WeftError as error:
        state.end(str(error))
    except Exception as error:  # a bug
        traceback.print_exc()
        state.end(f"{type(error).__name__}: {error}".splitlines()[0])
    os._exit(1)


if __name__ == "__main__":
    main()
