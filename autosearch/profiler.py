"""`Profiler`: measures the points and pairs of a `Profile` on a `Bench`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

from weft.autosearch.bench_protocol import Bench, Load
from weft.autosearch.pipeline_structure import LANES, every_operation
from weft.autosearch.profile import GuestPair, PairPoint, Point, Profile, kv_capacity, work_of
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.operations import Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation, Target
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig

CONFIGS = (SPECIAL, SPECIAL._replace(group=16), GemmConfig(128, 256, 64, 3, 8, 8), GemmConfig(128, 256, 64, 3, 8, 16))
"""Kernel configurations for nano-operations of GEMMs. All have the same tile width, because a GEMM reads the partial
sums that the previous one wrote per tile, and two ranges must have equally many."""
FP8_CONFIGS = tuple(GemmConfig(128, 256, 128, 4, 4, group=group, special=True) for group in (8, 16))
"""Kernel configurations for FP8 GEMMs."""
EARLY_PAIRS = 2
"""Number of GEMMs, largest first, to measure in pairs before most operations are measured alone."""


def configs_of(spec: ModelSpec) -> tuple[GemmConfig, ...]:
    return CONFIGS if spec.quantization is None else FP8_CONFIGS


class Grid(NamedTuple):
    """The measured sizes and SM counts."""

    tokens: tuple[int, ...]  # Tokens of GEMMs on all SMs; the last is the dense batch.
    few_tokens: tuple[int, ...]  # Tokens of GEMMs on fewer SMs.
    guest_sms: tuple[int, ...]  # SMs of attention and collectives next to a GEMM, which has the others.
    shares: tuple[float, ...]  # Shares of the dense batch's attention.

    @classmethod
    def coarse(cls, load: Load, num_sms: int) -> Grid:
        """About 140 points."""
        tokens = _steps(load.tokens, (0.125, 0.25, 0.5, 0.75, 1))
        return cls(tokens, _steps(load.tokens, (0.25, 0.5, 1)), _multiples(num_sms, (20, 32, 48, 64)), (0.25, 0.5, 1.0))

    @classmethod
    def full(cls, load: Load, num_sms: int) -> Grid:
        """Every multiple of 128 tokens and 8 SMs, as in the paper: about 840 points for a batch of 2048."""
        tokens = (*range(TOKEN_STEP, load.tokens, TOKEN_STEP), load.tokens)
        eighths = tuple(k / 8 for k in range(1, 9))
        return cls(tokens, tokens, tuple(range(8, num_sms // 2 + 1, 8)), eighths)


def _steps(tokens: int, shares: Sequence[float]) -> tuple[int, ...]:
    parts = (round(tokens * s) // TOKEN_STEP * TOKEN_STEP for s in shares if s < 1)
    return tuple(sorted({max(p, min(TOKEN_STEP, tokens)) for p in parts} | {tokens}))


def _multiples(num_sms: int, of_132: Sequence[int]) -> tuple[int, ...]:
    """Scale these counts to the GPU, in steps of 4 if it has at least 32 SMs."""
    step = 4 if num_sms >= 32 else 1
    return tuple(sorted({max(step, round(s * num_sms / 132 / step) * step) for s in of_132}))


class Profiler:
    """Measures one model on one bench, the most important points first."""

    def __init__(
        self, bench: Bench, spec: ModelSpec, load: Load, grid: Grid, progress: Callable[[str, int, int], None],
        finer: Grid | None = None, collectives: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """finer: measured after `grid` if time is left. collectives: kernels that the bench can run; None: all."""
        self._bench, self._grids, self._progress = bench, [grid, finer] if finer else [grid], progress
        self._clock = clock
        self._load = load.within(kv_capacity(bench.memory, spec))
        self._tried = configs_of(spec)
        self._operations = every_operation(spec, collectives)
        self._points: list[Point] = []
        self._pairs: list[PairPoint] = []
        self._guest_pairs: list[GuestPair] = []
        self._measured_pairs: set[tuple[str, str, float, int]] = set()
        self._configs: dict[str, GemmConfig] = {}

    def run(self, target: Target, budget_s: float, made: str = "") -> Profile:
        """Measure for `budget_s` seconds. Raises `ConfigError` if that does not cover one point of every operation."""
        end = self._clock() + budget_s
        tasks = self.tasks()
        done = 0
        for text, task in tasks:
            if self._clock() > end:
                break
            self._progress(text, done, len(tasks))
            task()
            done += 1
        self._progress("done" if done == len(tasks) else "out of time", done, len(tasks))
        if missing := set(self._operations) - {p.operation for p in self._points}:
            raise ConfigError(
                f"no time to measure {', '.join(sorted(missing))} in {budget_s:g} seconds: raise --budget-seconds"
            )
        features = {name: o.out for name, o in self._operations.items()}
        points, pairs, memory = tuple(self._points), tuple(self._pairs), self._bench.memory
        guests = tuple(self._guest_pairs)
        return Profile(
            target, self._load, features, points, pairs, memory, self._configs, made=made, guest_pairs=guests
        )

    def tasks(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (description, measurement), the most important first.

        Pairs come early, because without them a search assumes that overlap costs nothing."""
        return [task for grid in self._grids for task in self._tasks(grid)]

    def _tasks(self, grid: Grid) -> list[tuple[str, Callable[[], None]]]:
        alone, pairs, few = list(self._alone_on_all(grid)), list(self._paired(grid)), self._alone_on_few(grid)
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
            if op.role in (Role.PROJECTION, Role.EXPERTS):
                tokens = grid.tokens[len(grid.tokens) // 2]
                yield f"{op.name} configurations", lambda op=op, n=tokens: self._choose(op, n, some)  # type: ignore[misc]

    def _alone_on_few(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        for op in self._operations.values():
            is_gemm, amounts = op.role in (Role.PROJECTION, Role.EXPERTS), self._amounts(op, grid, grid.few_tokens)
            if is_gemm:
                for amount in amounts:
                    yield f"{op.name} alone", self._task(op, amount, self._bench.num_sms, op.name)
            for guest in grid.guest_sms:
                sms = self._bench.num_sms - guest if op.resource is Resource.COMPUTE else guest
                for amount in amounts:
                    yield f"{op.name} on {sms} SMs", self._task(op, amount, sms, op.name)

    def _paired(self, grid: Grid) -> Iterator[tuple[str, Callable[[], None]]]:
        computes = sorted((o for o in self._present() if o.resource is Resource.COMPUTE), key=lambda o: -o.parameters)
        guests = self._guests()
        memory, network = ([o for o in guests if o.resource is r] for r in (Resource.MEMORY, Resource.NETWORK))
        for op, guest in chain(product(computes, guests), product(memory, network)):  # the largest GEMMs first
            for sms in grid.guest_sms:
                yield f"{op.name} next to {guest.name} on {sms}", self._pair_task(grid, op, guest, sms)

    def _present(self) -> list[Operation]:
        return [o for o in self._operations.values() if work_of(o, self._load)]

    def _guests(self) -> list[Operation]:
        """Operations to pair with GEMMs: attention, and one collective of each kind (all cost the same)."""
        present = self._present()
        network = {o.kernel: o for o in present if o.resource is Resource.NETWORK}
        return [o for o in present if o.resource is Resource.MEMORY] + list(network.values())

    def _amounts(self, op: Operation, grid: Grid, tokens: tuple[int, ...]) -> tuple[Load, ...]:
        """Loads with increasing work for this operation and, for attention, for no other."""
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
        nano = NanoOperation(op.name, 0, amount.tokens, sms, LANES[op.resource], config=config)
        # a GEMM runs on the first tokens of the dense batch, attention on a separate batch
        timing = self._bench.alone(nano, amount if op.role.attends else self._load)
        self._points.append(Point(op.name, work, sms, timing.ms, timing.watts, timing.mhz, config))
        return self._points[-1]

    def _choose(self, op: Operation, tokens: int, sms: int) -> None:
        """Choose the kernel configuration of a GEMM's nano-operations: the fastest on these tokens and SMs."""
        if op.name in self._configs:
            return
        timed: list[tuple[float, GemmConfig]] = []
        for config in self._tried:
            try:
                timed.append((self._alone(op, self._load._replace(tokens=tokens), sms, config).ms, config))
            except (WeftError, ValueError):  # unsupported on this GPU or for these shapes
                continue
        if timed:
            self._configs[op.name] = min(timed, key=lambda t: t[0])[1]

    def _pair_task(self, grid: Grid, op: Operation, guest: Operation, sms: int) -> Callable[[], None]:
        """Measure a pair on the dense batch: a GEMM on half of its tokens, other operations on all of their work.

        A memory operation next to a collective has as many SMs as that; a compute operation has all others."""

        def task() -> None:
            compute, is_gemm = op.resource is Resource.COMPUTE, op.role in (Role.PROJECTION, Role.EXPERTS)
            own, load = self._bench.num_sms - sms if compute else sms, self._load
            amounts = self._amounts(op, grid, grid.few_tokens)
            amount = amounts[len(amounts) // 2 if is_gemm else -1]
            other = self._amounts(guest, grid, grid.few_tokens)[-1]
            works = work_of(op, amount), work_of(guest, other)
            if (key := (op.name, guest.name, works[0], sms)) in self._measured_pairs:
                return
            self._measured_pairs.add(key)
            config = self._configs.get(op.name)
            self._alone(op, amount, own, config)  # the baselines of the pair
            self._alone(guest, other, sms, None)
            tokens = amount.tokens if is_gemm else load.tokens
            a = NanoOperation(op.name, 0, tokens, own, LANES[op.resource], config=config)
            b = NanoOperation(guest.name, 0, load.tokens, sms, LANES[guest.resource])
            first, second = self._bench.pair(a, b, load)
            values = (op.name, guest.name, *works, own, sms, first.ms, second.ms, first.watts)
            if compute:
                self._pairs.append(PairPoint(*values))
            else:
                self._guest_pairs.append(GuestPair(*values))

        return task
