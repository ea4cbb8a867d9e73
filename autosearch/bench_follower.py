"""A rank but the first of a bench of several GPUs: `python -m weft.autosearch.bench_follower RANK PARENT`.

PARENT is the process of rank 0, or 0 where the thread that starts this does not live as long as that. On stdin come
lines of JSON: an `Opening`, then what is `Asked`, which all ranks measure at once. It ends with stdin.
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

from weft.autosearch.bench_protocol import Bench, Load, SumsBench, Timing
from weft.engine.config import EngineConfig
from weft.engine.errors import RankLost, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.wire.child import settle

if TYPE_CHECKING:
    from weft.autosearch.gpu_bench import GpuBench


class Opening(msgspec.Struct, frozen=True):
    """What every rank's bench is made from."""

    model: str
    """folder of the whole model"""
    descriptors: str
    max_tokens: int
    max_context: int
    seconds: float
    """see `Bench`"""
    tuning_seconds: float
    """of rank 0"""


class Asked(msgspec.Struct, frozen=True):
    """A measurement: arguments of the method `what` of a `Bench`; or new `seconds` or `sums` for those to come."""

    what: Literal["alone", "pair", "period", "seconds", "sums"]
    operations: tuple[NanoOperation, ...] = ()
    period: Period | None = None
    load: Load | None = None
    seconds: float = 0.0
    way: str = ""


def measure(bench: Bench, asked: Asked) -> tuple[Timing, ...]:
    """Raises what the bench raises."""
    if asked.what == "seconds":
        bench.seconds = asked.seconds
        return ()
    if asked.what == "sums":
        assert isinstance(bench, SumsBench)
        bench.sums(asked.way)
        return ()
    assert asked.load is not None
    if asked.what == "period":
        assert asked.period is not None
        return (bench.period(asked.period, asked.load),)
    if asked.what == "alone":
        return (bench.alone(asked.operations[0], asked.load),)
    first, second = asked.operations
    return bench.pair(first, second, asked.load)


def follow(bench: Bench, lines: Iterable[bytes]) -> None:
    """Measure what is asked for, until there is no more. What cannot be measured, rank 0 has seen to fail as well."""
    for line in lines:
        try:
            measure(bench, msgspec.json.decode(line, type=Asked))
        except RankLost:
            raise
        except (WeftError, ValueError):
            continue


def open_rank(
    links: Links,
    opening: Opening,
    progress: Callable[[str], None] = lambda _: None,
    make: type[GpuBench] | None = None,
) -> GpuBench:
    """The bench of one rank; all ranks make theirs at once. Rank 0 tunes products, the others read what it found.

    make: the class of the bench, if not `GpuBench`. Raises `ConfigError`, `ModelError`, `OutOfMemory` or `RankLost`.
    """
    import torch

    from weft.engine.ranks.shared_collectives import SharedCollectives

    host, spec = SharedCollectives(links), read_spec(Path(opening.model)).shard(links.rank, links.ranks)
    from weft.autosearch.gpu_bench import GpuBench
    from weft.engine.runner.start.gemm_tuning import prepare_products

    config, device = EngineConfig.model_validate({}), torch.device("cuda", torch.cuda.current_device())

    def told(phase: str, done: int, total: int) -> None:
        links.check()
        progress(f"{phase}, {done} of {total}")

    def prepare(seconds: float) -> None:
        prepare_products(spec, device, opening.max_tokens, config.cache_path, seconds, told)

    if links.rank == 0:
        prepare(opening.tuning_seconds)
    host.all_gather(torch.tensor([1]))
    if links.rank != 0:
        prepare(0.0)
    return (make or GpuBench)(
        spec, max_tokens=opening.max_tokens, max_context=opening.max_context, seconds=opening.seconds, host=host
    )  # fmt: skip


def lines_of_stdin() -> Iterable[bytes]:
    """Of stdin, read on a thread: with its end the process ends, whatever it waits for."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="weft-stdin", daemon=True).start()
    return iter(lines.get, None)


def main(open_bench: Callable[[Links, Opening], Bench] = open_rank) -> int:
    """Follow rank 0 until stdin ends, with the bench that `open_bench` makes."""
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    settle(parent or None)
    opening = msgspec.json.decode(sys.stdin.buffer.readline(), type=Opening)
    links = Links(rank, Descriptors.load(opening.descriptors))
    state = links.state(rank)
    try:
        follow(open_bench(links, opening), lines_of_stdin())
    except WeftError as error:
        state.end(str(error))
    except Exception as error:  # a defect
        traceback.print_exc()
        state.end(f"{type(error).__name__}: {error}".splitlines()[0])
    os._exit(1)


if __name__ == "__main__":
    main()
