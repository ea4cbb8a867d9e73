"""Fills a `Profile` through a `Bench`: `python -m weft.autosearch.profiler --model DIR --out FILE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft import output_file
from weft.autosearch.bench_protocol import Bench, Load
from weft.autosearch.options import OneLineParser
from weft.autosearch.profile import GuestPair, PairPoint, Point, Profile, cache_path, kv_capacity, work_of
from weft.autosearch.structure import LANES, every_operation
from weft.autosearch.workload import workload_load
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import COLLECTIVES
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation, Target
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig

if TYPE_CHECKING:
    from weft.autosearch.gpu_bench import GpuBench
    from weft.autosearch.ranks_bench import RanksBench

CONFIGS = (
    SPECIAL,
    SPECIAL._replace(group=16),
    GemmConfig(128, 256, 64, 3, 8, 8),
    GemmConfig(128, 256, 64, 3, 8, 16),
)
"""for nano-operations of products; all of one tile width, because a product reads partial sums that the one before
wrote per tile and two ranges must have equally many"""


FP8_CONFIGS = tuple(GemmConfig(128, 256, 128, 4, 4, group=group, special=True) for group in (8, 16))
"""the same of products in FP8"""


def configs_of(spec: ModelSpec) -> tuple[GemmConfig, ...]:
    return CONFIGS if spec.quantization is None else FP8_CONFIGS


SECONDS = 0.2
"""of one measurement: half a second changes few of them by more than 3 % (H200, 2026-11-22)"""
TUNING_SECONDS = 60.0
"""for matrix products of shapes that nobody has tuned, before anything is measured"""
EARLY_PAIRS = 2
"""products, the largest, whose pairs come before most of what is measured alone"""


class Grid(NamedTuple):
    """Where operations are measured."""

    tokens: tuple[int, ...]
    """of products, on all SMs; the last one is the dense batch"""
    few_tokens: tuple[int, ...]
    """of products on fewer SMs"""
    guest_sms: tuple[int, ...]
    """SMs of attention and collectives beside a product, which has the others"""
    shares: tuple[float, ...]
    """of the dense batch's attention"""

    @classmethod
    def coarse(cls, load: Load, num_sms: int) -> Grid:
        """About 140 points."""
        tokens = _steps(load.tokens, (0.125, 0.25, 0.5, 0.75, 1))
        return cls(tokens, _steps(load.tokens, (0.25, 0.5, 1)), _multiples(num_sms, (20, 32, 48, 64)), (0.25, 0.5, 1.0))

    @classmethod
    def full(cls, load: Load, num_sms: int) -> Grid:
        """Every multiple of 128 tokens and of 8 SMs, as in the paper: about 840 points for a batch of 2048."""
        tokens = (*range(TOKEN_STEP, load.tokens, TOKEN_STEP), load.tokens)
        eighths = tuple(k / 8 for k in range(1, 9))
        return cls(tokens, tokens, tuple(range(8, num_sms // 2 + 1, 8)), eighths)


def _steps(tokens: int, shares: Sequence[float]) -> tuple[int, ...]:
    parts = (round(tokens * s) // TOKEN_STEP * TOKEN_STEP for s in shares if s < 1)
    return tuple(sorted({max(p, min(TOKEN_STEP, tokens)) for p in parts} | {tokens}))


def _multiples(num_sms: int, of_132: Sequence[int]) -> tuple[int, ...]:
    """These counts, in proportion on a GPU of another size, in steps of 4 where it has as many."""
    step = 4 if num_sms >= 32 else 1
    return tuple(sorted({max(step, round(s * num_sms / 132 / step) * step) for s in of_132}))


class Profiler:
    """Measures one model on one bench. The most important points come first; `budget_s` cuts off the rest."""

    def __init__(
        self, bench: Bench, spec: ModelSpec, load: Load, grid: Grid, progress: Callable[[str, int, int], None],
        finer: Grid | None = None, collectives: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """finer: measured after `grid`, as far as the time goes. collectives: kernels of those that the bench runs;
        None: of all.
        """
        self._bench, self._grids, self._progress = bench, [grid, finer] if finer else [grid], progress
        self._load = load.within(kv_capacity(bench.memory, spec))
        self._tried = configs_of(spec)
        self._operations = every_operation(spec, collectives)
        self._points: list[Point] = []
        self._pairs: list[PairPoint] = []
        self._guest_pairs: list[GuestPair] = []
        self._configs: dict[str, GemmConfig] = {}

    def run(self, target: Target, budget_s: float, made: str = "") -> Profile:
        """Raises `ConfigError` when the budget does not even allow one point of every operation."""
        end = time.monotonic() + budget_s
        tasks = self.tasks()
        done = 0
        for text, task in tasks:
            if time.monotonic() > end:
                break
            self._progress(text, done, len(tasks))
            task()
            done += 1
        self._progress("done" if done == len(tasks) else "its share of the time is over", done, len(tasks))
        if missing := set(self._operations) - {p.operation for p in self._points}:
            raise ConfigError(f"{budget_s:g} seconds are too few: {', '.join(sorted(missing))} was not measured")
        features = {name: o.out for name, o in self._operations.items()}
        points, pairs, memory = tuple(self._points), tuple(self._pairs), self._bench.memory
        guests = tuple(self._guest_pairs)
        return Profile(
            target, self._load, features, points, pairs, memory, self._configs, made=made, guest_pairs=guests
        )

    def tasks(self) -> list[tuple[str, Callable[[], None]]]:
        """What is measured, in words and how, the most important first.

        Pairs come early: without them a search would believe that overlap costs nothing.
        """
        return [task for grid in self._grids for task in self._tasks(grid)]

    def _tasks(self, grid: Grid) -> list[tuple[str, Callable[[], None]]]:
        alone, pairs, few = list(self._alone_on_all(grid)), list(self._beside(grid)), self._alone_on_few(grid)
        dense, first = len(self._operations), len(grid.guest_sms) * EARLY_PAIRS * max(1, len(self._guests()))
        return [*alone[:dense], *self._choices(grid), *pairs[:first], *alone[dense:], *pairs[first:], *few]

    def _alone_on_all(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        for last in (True, False):  # the dense batch of every operation first
            for op in self._operations.values():
                for amount in self._amounts(op, grid, grid.tokens):
                    if last == (amount == self._amounts(op, grid, grid.tokens)[-1]):
                        yield f"{op.name} alone", self._task(op, amount, self._bench.num_sms, None)

    def _choices(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        guests = grid.guest_sms
        some = self._bench.num_sms - guests[len(guests) // 2 - 1]
        for op in self._operations.values():
            if op.role in (Role.PRODUCT, Role.EXPERTS):
                tokens = grid.tokens[len(grid.tokens) // 2]
                yield f"{op.name} configurations", lambda op=op, n=tokens: self._choose(op, n, some)  # type: ignore[misc]

    def _alone_on_few(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        for op in self._operations.values():
            is_product, amounts = op.role in (Role.PRODUCT, Role.EXPERTS), self._amounts(op, grid, grid.few_tokens)
            if is_product:
                for amount in amounts:
                    yield f"{op.name} alone", self._task(op, amount, self._bench.num_sms, op.name)
            for guest in grid.guest_sms:
                sms = self._bench.num_sms - guest if op.resource is Resource.COMPUTE else guest
                for amount in amounts:
                    yield f"{op.name} on {sms} SMs", self._task(op, amount, sms, op.name)

    def _beside(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        computes = sorted((o for o in self._present() if o.resource is Resource.COMPUTE), key=lambda o: -o.parameters)
        guests = self._guests()
        for op in computes:  # the largest beside all guests first
            for guest in guests:
                for sms in grid.guest_sms:
                    yield f"{op.name} beside {guest.name} on {sms}", self._pair_task(grid, op, guest, sms)
        memory, network = ([o for o in guests if o.resource is r] for r in (Resource.MEMORY, Resource.NETWORK))
        for own, guest in product(memory, network):
            for sms in grid.guest_sms:
                yield f"{own.name} beside {guest.name} on {sms}", self._guest_task(grid, own, guest, sms)

    def _present(self) -> list[Operation]:
        return [o for o in self._operations.values() if work_of(o, self._load)]

    def _guests(self) -> list[Operation]:
        """What runs beside products: attention, and one collective of each kind; what they cost others is the same."""
        present = self._present()
        network = {o.kernel: o for o in present if o.resource is Resource.NETWORK}
        return [o for o in present if o.resource is Resource.MEMORY] + list(network.values())

    def _amounts(self, op: Operation, grid: Grid, tokens: tuple[int, ...]) -> tuple[Load, ...]:
        """Loads that hold more and more of this operation's work and, for attention, of nothing else."""
        load = self._load
        if not op.role.attends:
            return tuple(load._replace(tokens=t) for t in tokens)
        if op.role is Role.DECODE_ATTENTION:
            counts = sorted({max(1, round(load.decodes * s)) for s in grid.shares})
            return tuple(load._replace(tokens=n, decodes=n) for n in counts)
        counts = sorted({max(1, round(load.prefill_tokens * s)) for s in grid.shares})
        return tuple(load._replace(tokens=n, decodes=0) for n in counts)

    def _task(self, op: Operation, amount: Load, sms: int, config_of: str | None) -> Callable[[], None]:
        def task() -> None:
            self._alone(op, amount, sms, self._configs.get(config_of) if config_of else None)

        return task

    def _alone(self, op: Operation, amount: Load, sms: int, config: GemmConfig | None) -> Point:
        work = work_of(op, amount)
        for point in self._points:
            if (point.operation, point.work, point.sms, point.config) == (op.name, work, sms, config):
                return point
        nano, load = self._nano(op, amount, sms, config)
        timing = self._bench.alone(nano, load)
        self._points.append(Point(op.name, work, sms, timing.ms, timing.watts, timing.mhz, config))
        return self._points[-1]

    def _nano(
        self, op: Operation, amount: Load, sms: int, config: GemmConfig | None
    ) -> tuple[NanoOperation, Load]:  # fmt: skip
        """A product runs on the first tokens of the dense batch, attention on the whole of a batch of its own."""
        nano = NanoOperation(op.name, 0, amount.tokens, sms, LANES[op.resource], config=config)
        return nano, amount if op.role.attends else self._load

    def _choose(self, op: Operation, tokens: int, sms: int) -> None:
        """The configuration of this product's nano-operations: the fastest on half of the tokens and most SMs."""
        if op.name in self._configs:
            return
        timed: list[tuple[float, GemmConfig]] = []
        for config in self._tried:
            try:
                timed.append((self._alone(op, self._load._replace(tokens=tokens), sms, config).ms, config))
            except (WeftError, ValueError):  # not for this GPU or these shapes
                continue
        if timed:
            self._configs[op.name] = min(timed, key=lambda t: t[0])[1]

    def _pair_task(self, grid: Grid, op: Operation, guest: Operation, sms: int) -> Callable[[], None]:
        """Both on the dense batch; a product on half of its tokens, attention on all of its work."""

        def task() -> None:
            own, load = self._bench.num_sms - sms, self._load
            amounts = self._amounts(op, grid, grid.few_tokens)
            amount = amounts[len(amounts) // 2 if op.role in (Role.PRODUCT, Role.EXPERTS) else -1]
            other = self._amounts(guest, grid, grid.few_tokens)[-1]
            works = work_of(op, amount), work_of(guest, other)
            if any(
                (p.compute, p.guest, p.compute_work, p.guest_sms) == (op.name, guest.name, works[0], sms)
                for p in self._pairs
            ):
                return
            config = self._configs.get(op.name)
            self._alone(op, amount, own, config)  # the pair is judged against these
            self._alone(guest, other, sms, None)
            tokens = amount.tokens if op.role in (Role.PRODUCT, Role.EXPERTS) else load.tokens
            a = NanoOperation(op.name, 0, tokens, own, "compute", config=config)
            b = NanoOperation(guest.name, 0, load.tokens, sms, LANES[guest.resource])
            first, second = self._bench.pair(a, b, load)
            self._pairs.append(PairPoint(op.name, guest.name, *works, own, sms, first.ms, second.ms, first.watts))

        return task

    def _guest_task(self, grid: Grid, memory: Operation, network: Operation, sms: int) -> Callable[[], None]:
        """Both on as many SMs and all of the load's work."""

        def task() -> None:
            sides = [(op, self._amounts(op, grid, grid.few_tokens)[-1]) for op in (memory, network)]
            names, works = (memory.name, network.name), [work_of(op, amount) for op, amount in sides]
            if any((p.memory, p.network, p.memory_sms) == (*names, sms) for p in self._guest_pairs):
                return
            for op, amount in sides:  # the pair is judged against these
                self._alone(op, amount, sms, None)
            a, b = (NanoOperation(op.name, 0, self._load.tokens, sms, LANES[op.resource]) for op, _ in sides)
            first, second = self._bench.pair(a, b, self._load)
            self._guest_pairs.append(GuestPair(*names, works[0], works[1], sms, sms, first.ms, second.ms, first.watts))

        return task


def record(bench: Bench, spec: ModelSpec, load: Load, target: Target, budget_s: float, made: str = "") -> Profile:
    """A profile with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("profile"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        profiler = Profiler(
            bench, spec, load, Grid.coarse(load, bench.num_sms),
            lambda text, done, of: bar.update(task, description=text, completed=done, total=of),
            Grid.full(load, bench.num_sms), COLLECTIVES,
        )  # fmt: skip
        return profiler.run(target, budget_s, made)


def main(argv: Sequence[str] | None = None) -> int:
    """Record a profile on this machine's GPU."""
    parser = OneLineParser(prog="weft.autosearch.profiler", description=main.__doc__)
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument(
        "--workload", metavar="P:D", default="1024:512", help="mean prompt and output tokens [1024:512]"
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=2048, help="the dense batch [2048]")
    parser.add_argument(
        "--out", metavar="FILE", type=partial(output_file, via_rename=True), help="where to write it [the cache]"
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--budget-seconds",
        metavar="S",
        type=float,
        default=150,
        help="time for measuring: a coarse grid, then a fine one as far as it goes [150]",
    )
    limit.add_argument("--full", action="store_true", help="every 128 tokens and 8 SMs, however long it takes")
    parser.add_argument(
        "--measure-seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help=f"how long one measurement runs; its second half counts [{SECONDS}]",
    )
    arguments = parser.parse_args(argv)
    try:
        spec = read_spec(arguments.model)
        load = workload_load(arguments.workload, arguments.tokens)
        bench, target = open_gpu(spec, load, arguments.measure_seconds, model=arguments.model)
        with closing(bench):
            seconds = float("inf") if arguments.full else arguments.budget_seconds
            profile = record(bench, spec, load, target, seconds, made=today())
        out = arguments.out or cache_path(target)
        profile.save(out)
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {len(profile.points)} points, {len(profile.pairs)} pairs on {target.gpu}")
    return 0


def open_gpu(
    spec: ModelSpec, load: Load, seconds: float = SECONDS, progress: Callable[[str], None] = lambda _: None,
    model: Path | None = None, tuning_seconds: float = TUNING_SECONDS,
) -> tuple[GpuBench | RanksBench, Target]:  # fmt: skip
    """This machine's GPU as a bench, its matrix products tuned as an engine tunes them at its start; as many GPUs as
    the model is split over.

    model: folder of the whole one; `spec` may be a rank's part of it. Raises `ConfigError` without such GPUs.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU to measure on: give a recorded profile with --profile FILE")
    from weft.autosearch.compiled import compile_first
    from weft.autosearch.gpu_bench import GpuBench
    from weft.autosearch.ranks_bench import RanksBench
    from weft.engine.config import EngineConfig
    from weft.engine.plans.choose import target_of
    from weft.engine.runner.start.gemm_tuning import prepare_products

    context = max(load.prompt, 2 * load.context)
    tokens = -(-load.tokens // TOKEN_STEP) * TOKEN_STEP
    if model is not None and spec.quantization is None:
        compile_first(spec, model, tokens, tuning_seconds, progress)
    target = target_of(spec, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if (ranks := spec.shard_of.ranks) > 1:
        if (here := torch.cuda.device_count()) < ranks:
            raise ConfigError(f"--tensor-parallel-size {ranks} measures on as many GPUs, and there are {here} here")
        assert model is not None
        several = RanksBench(
            model, ranks, max_tokens=tokens, max_context=context, seconds=seconds, tuning_seconds=tuning_seconds,
            progress=progress,
        )  # fmt: skip
        return several, target
    config = EngineConfig.model_validate({})
    prepare_products(  # or the serial plan would be slower than the engine's
        spec, torch.device("cuda"), tokens, config.cache_path, tuning_seconds,
        lambda phase, done, of: progress(f"{phase}, {done} of {of}"),
    )  # fmt: skip
    bench = GpuBench(spec, max_tokens=tokens, max_context=context, seconds=seconds)
    return bench, target


def today() -> str:
    """Date and versions, for the reader of a file."""
    from importlib.metadata import PackageNotFoundError, version

    names = []
    for name in ("torch", "triton"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([datetime.now(UTC).strftime("%Y-%m-%d"), *names])


if __name__ == "__main__":
    raise SystemExit(main())
