"""Sums after GEMMs that write to other ranks (`pushed`), executed by ranks whose kernels' steps run in any order.

A rank's kernels start by dependent launch: the programs of one, as programs fit, once all of the previous kernel's have
released them or ended; a wait is for the end of that one kernel, not of those before it. Every number records which sum
it belongs to. So the model detects a read of a value that is missing or overwritten, a write during a read, an endless
wait, and a wait for one kernel that did not wait for all.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Steps = Iterator[Callable[[], bool]]
"""The code between two of these runs at once; a yielded function returns whether it may resume."""
ROWS, TILE_ROWS = 4, 2
"""of a launch, of a tile"""
ROOM = 4
"""programs that fit a rank's GPU"""
PRODUCTS, OTHERS = (2, ROOM + 1), 3
"""programs of a product, one or the other; of each other kernel that has several"""


class Iteration(NamedTuple):
    """A graph that all ranks replay."""

    sent: tuple[bool, ...]
    """by sum after the embedding's: whether its GEMM writes to the ranks"""
    steps: int
    """splits of those"""
    shots: int
    """of the others, the embedding's among them"""
    live: int
    """rows in use; 0: what is launched is only loaded"""


class Cell:
    def __init__(self) -> None:
        self.value, self.readers = -1, 0

    def write(self, value: int) -> None:
        assert not self.readers, "written while it is read"
        self.value = value


def now() -> bool:
    return True


def reading(cells: Iterable[Cell], value: int) -> Steps:
    """Takes a while, in which no program may write."""
    cells = list(cells)
    for cell in cells:
        assert cell.value == value, "of another sum"
        cell.readers += 1
    yield now
    for cell in cells:
        assert cell.value == value, "overwritten"
        cell.readers -= 1


class Kernel:
    """One launch. play: the generator of each of its programs. dependent: it may start before the previous one has
    ended."""

    def __init__(self, play: Callable[[Kernel, int], Steps], programs: int = 1, *, dependent: bool = True) -> None:
        self.play, self.programs, self.dependent = play, programs, dependent
        self.earlier: list[Kernel] = []
        self.ended = self.drawn = 0
        self.released: set[int] = set()

    @property
    def complete(self) -> bool:
        return self.ended == self.programs

    @property
    def lets_in(self) -> bool:
        """Whether all programs have released the next kernel. An ended program has done so."""
        return len(self.released) == self.programs

    def may_start(self) -> bool:
        if not self.earlier:
            return True
        before = self.earlier[-1]
        return before.lets_in if self.dependent else before.complete

    def wait(self) -> Steps:
        yield lambda: not self.earlier or self.earlier[-1].complete
        assert all(kernel.complete for kernel in self.earlier), "waited for the kernel before it, not for all"


class Rank:
    def __init__(self) -> None:
        self.cells: defaultdict[tuple[object, ...], Cell] = defaultdict(Cell)
        self.flags: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self.number = self.ticket = 0
        self.room = ROOM


class Ranks:
    """broken: a mistake that the kernels do not make, by its name."""

    def __init__(self, ranks: int, features: int, seed: int, broken: str = "") -> None:
        """features: tiles of each rank's columns."""
        self.count, self.features, self.broken = ranks, features, broken
        self.rng = random.Random(seed)
        self.ranks = [Rank() for _ in range(ranks)]
        self.playing: list[tuple[int, Steps, Callable[[], bool]]] = []

    # -- kernels

    def send_flags(self, rank: int, *what: object) -> Steps:
        for peer in self.ranks:
            peer.flags[(*what, rank)] = self.ranks[rank].number
            yield now

    def await_flags(self, rank: int, *what: object) -> Steps:
        for peer in range(self.count):
            yield self.has_flags(rank, *what, peer)

    def has_flags(self, rank: int, *flag: object) -> Callable[[], bool]:
        own = self.ranks[rank]
        return lambda: own.flags[flag] >= own.number

    def row(self, rank: int, row: int, parts: Iterable[int]) -> list[Cell]:
        cells = self.ranks[rank].cells
        return [cells[name, row, part] for part in parts for name in ("x", "squares")]

    def put(self, rank: int, row: int, parts: Iterable[int], value: int) -> None:
        for cell in self.row(rank, row, parts):
            cell.write(value)

    def advance(self, rank: int) -> Kernel:
        def play(kernel: Kernel, _: int) -> Steps:
            yield from kernel.wait()
            self.ranks[rank].number += 1

        return Kernel(play, dependent=False)

    def rows(self, rank: int, live: int, reads: str, writes: tuple[object, ...], value: int, *, early: bool) -> Kernel:
        """Moves each row from one place to another. early: releases the next kernel before it waits."""
        cells = self.ranks[rank].cells

        def play(kernel: Kernel, program: int) -> Steps:
            if early:
                kernel.released.add(program)
            if self.broken != "idle" or not early or program < live:
                yield from kernel.wait()
            kernel.released.add(program)
            for row in range(program, live, kernel.programs):
                if reads == "x":
                    yield from reading(self.row(rank, row, range(self.count)), value - 1)
                elif reads:
                    yield from reading([cells[reads, row]], value)
                cells[(*writes, row)].write(value)
                yield now

        return Kernel(play, OTHERS)

    def product(self, rank: int, live: int, place: int, index: int, steps: int, value: int) -> Kernel:
        """index: of its flags among those of its graph. Runs in an order of this rank's own."""
        tiles = [(m, n) for m in range(-(-live // TILE_ROWS)) for n in range(self.count * self.features)]
        self.rng.shuffle(tiles)
        at_once = self.rng.random() < 0.5

        def play(kernel: Kernel, program: int) -> Steps:
            yield from kernel.wait()
            if at_once:
                kernel.released.add(program)
            for m, n in tiles[program :: kernel.programs]:
                rows = range(m * TILE_ROWS, min(live, (m + 1) * TILE_ROWS))
                yield from reading([self.ranks[rank].cells["a", row] for row in rows], value)
                to = [self.ranks[n // self.features]] if steps == 2 else self.ranks
                for sets_flags in (True, False) if self.broken == "flags first" else (False, True):
                    for peer in to:
                        if sets_flags:
                            peer.flags["tile", index, rank, m, n] = self.ranks[rank].number
                        else:
                            peer.cells["inbox", place, rank, m, n].write(value)
                        yield now

        return Kernel(play, self.rng.choice(PRODUCTS))

    def pushed_sum(self, rank: int, live: int, place: int, index: int, steps: int, value: int) -> Kernel:
        own = self.ranks[rank]

        def add_up(row: int, part: int) -> Steps:
            m, tiles = row // TILE_ROWS, range(part * self.features, (part + 1) * self.features)
            for source in range(self.count):
                for n in tiles:
                    yield self.has_flags(rank, "tile", index, source, m, n)
            came = [own.cells["inbox", place, source, m, n] for source in range(self.count) for n in tiles]
            yield from reading(came, value)
            yield from reading(self.row(rank, row, [part]), value - 1)
            for peer in range(self.count) if steps == 2 else [rank]:
                self.put(peer, row, [part], value)
                yield now

        def in_one(kernel: Kernel, program: int) -> Steps:
            yield from kernel.wait()
            kernel.released.add(program)
            for item in range(program, live * self.count, kernel.programs):
                yield from add_up(item // self.count, item % self.count)

        def in_two(kernel: Kernel, program: int) -> Steps:
            def draw() -> int:
                item = own.ticket
                assert item == kernel.drawn, "a ticket of another sum"
                own.ticket, kernel.drawn = item + 1, item + 1
                return item

            kernel.released.add(program)
            item = draw()
            yield now
            while item < live:
                following = draw()
                yield now
                yield from add_up(item, rank)
                item = following
            if self.broken != "no wait":
                yield from kernel.wait()

        return Kernel(in_two if steps == 2 else in_one, OTHERS)

    def plain_sum(self, rank: int, live: int, turn: int, sum_: int, shots: int, value: int) -> Kernel:
        """`collectives.reduce`. value: of its numbers; the embedding's is added to nothing."""

        def play(kernel: Kernel, program: int) -> Steps:
            yield from kernel.wait()
            kernel.released.add(program)
            if program == 0:
                yield from self.send_flags(rank, "sum", sum_)
            yield from self.await_flags(rank, "sum", sum_)
            items = live if shots == 2 else live * self.count
            for item in range(program, items, kernel.programs):
                row, part = (item, rank) if shots == 2 else divmod(item, self.count)
                yield from reading([peer.cells["partial", turn, row] for peer in self.ranks], value)
                if sum_:
                    yield from reading(self.row(rank, row, [part]), value - 1)
                for peer in range(self.count) if shots == 2 else [rank]:
                    self.put(peer, row, [part], value)
                    yield now

        return Kernel(play, OTHERS)

    def meeting(self, rank: int, sum_: int, *, sent: bool) -> Kernel:
        def play(kernel: Kernel, program: int) -> Steps:
            yield from kernel.wait()
            if sent and self.broken != "no reset":
                self.ranks[rank].ticket = 0
            yield from self.send_flags(rank, "meet", sum_)
            if self.broken != "deaf":
                yield from self.await_flags(rank, "meet", sum_)
            kernel.released.add(program)

        return Kernel(play)

    def exchange(self, rank: int) -> Kernel:
        """The exchange of samplers."""

        def play(kernel: Kernel, program: int) -> Steps:
            yield from kernel.wait()
            kernel.released.add(program)
            yield from self.send_flags(rank, "samples")
            yield from self.await_flags(rank, "samples")

        return Kernel(play)

    # -- launches of a rank

    def kernels(self, rank: int, iterations: Iterable[Iteration]) -> Iterator[Kernel]:
        value = 0
        for it in iterations:
            value += 1
            yield self.advance(rank)
            yield self.rows(rank, it.live, "", ("partial", 0), value, early=False)
            yield self.plain_sum(rank, it.live, 0, 0, it.shots, value)
            if it.shots == 2:
                yield self.meeting(rank, 0, sent=False)
            sent = 0
            for i, sends in enumerate(it.sent, 1):
                value += 1
                yield self.rows(rank, it.live, "x", ("q",), value, early=False)
                yield self.rows(rank, it.live, "q", ("a",), value, early=True)  # as attention does
                if sends:
                    place = 0 if self.broken == "one place" else sent % 2
                    yield self.product(rank, it.live, place, sent, it.steps, value)
                    yield self.pushed_sum(rank, it.live, place, sent, it.steps, value)
                    sent += 1
                else:
                    yield self.rows(rank, it.live, "a", ("partial", i % 2), value, early=False)
                    yield self.plain_sum(rank, it.live, i % 2, i, it.shots, value)
                if (it.steps if sends else it.shots) == 2:
                    yield self.meeting(rank, i, sent=sends)
            yield self.rows(rank, it.live, "x", ("logits",), value + 1, early=False)
            if self.broken != "no exchange":
                yield self.exchange(rank)

    def launches(self, rank: int, iterations: Iterable[Iteration]) -> Steps:
        own = self.ranks[rank]
        earlier: list[Kernel] = []
        for kernel in self.kernels(rank, iterations):
            kernel.earlier = earlier[-8:]  # those that may be running
            earlier.append(kernel)
            for program in range(kernel.programs):
                yield partial(self.may_start, own, kernel)
                own.room -= 1
                self.playing.append((rank, self.program(rank, kernel, program), now))

    def may_start(self, own: Rank, kernel: Kernel) -> bool:
        return own.room > 0 and kernel.may_start()

    def program(self, rank: int, kernel: Kernel, program: int) -> Steps:
        yield from kernel.play(kernel, program)
        yield now  # ending is a step, too
        kernel.released.add(program)
        kernel.ended += 1
        self.ranks[rank].room += 1

    def run(self, iterations: Iterable[Iteration]) -> None:
        """Runs to the end, in a random order in which a rank, or a program, is sometimes slow for a while."""
        iterations = list(iterations)
        self.playing = [(rank, self.launches(rank, iterations), now) for rank in range(self.count)]
        slow_rank, slow, left = -1, self.playing[0][1], 0
        while self.playing:
            if left == 0:
                left = self.rng.randrange(1, 120)
                slow_rank = self.rng.randrange(-1, self.count)
                slow = self.rng.choice(self.playing)[1]
            left -= 1
            order = self.rng.sample(range(len(self.playing)), len(self.playing))
            order.sort(key=lambda i: self.playing[i][0] == slow_rank or self.playing[i][1] is slow)
            at = next((i for i in order if self.playing[i][2]()), None)
            assert at is not None, "all wait for ever"
            rank, steps, _ = self.playing[at]
            if (until := next(steps, None)) is None:
                self.playing.pop(at)
            else:
                self.playing[at] = rank, steps, until
        assert all(rank.room == ROOM for rank in self.ranks)


ITERATIONS = st.builds(
    Iteration,
    st.lists(st.sampled_from((True, True, True, False)), min_size=3, max_size=5).map(tuple),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.integers(0, ROWS),
)
SEEDS = st.integers(0, 1 << 30)


@settings(max_examples=80)
@given(st.integers(2, 4), st.integers(1, 2), st.lists(ITERATIONS, min_size=2, max_size=3), SEEDS)
def test_sums_finish_and_no_rank_reads_another_sum(
    ranks: int, features: int, iterations: list[Iteration], seed: int
) -> None:
    Ranks(ranks, features, seed).run(iterations)


IN_ONE, IN_TWO, LEFT, EMPTY = (
    [Iteration((sent,) * 4, steps, 1, live)] * 2
    for sent, steps, live in ((True, 1, 3), (True, 2, 3), (False, 1, 3), (True, 2, 0))
)


@pytest.mark.parametrize(
    ("broken", "iterations", "seen"),
    [
        ("one place", IN_ONE, "written while|overwritten|another sum"),
        ("flags first", IN_ONE, "another sum|written while"),
        ("flags first", IN_TWO, "another sum|written while"),
        ("no reset", IN_TWO, "a ticket of another"),
        ("no wait", IN_TWO, "not for all"),
        ("deaf", IN_TWO, "another sum"),
        ("idle", EMPTY, "not for all"),
        ("no exchange", LEFT, "another sum|written while|overwritten"),
    ],
)  # fmt: skip
def test_the_model_detects_mistakes(broken: str, iterations: list[Iteration], seen: str) -> None:
    Ranks(2, 1, 0).run(iterations)

    def play() -> None:
        for seed in range(300):
            Ranks(2, 1, seed, broken).run(iterations)

    with pytest.raises(AssertionError, match=seen):
        play()
