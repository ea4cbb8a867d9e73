"""`ChunkKeeper`: keeps the prompts of a scheduler's iterations as small as the time between tokens asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.engine.config import Objective
from weft.engine.runner.batch import I32, Batch, StepResult
from weft.engine.runner.work import Costs
from weft.engine.scheduling.chunk_limit import BOUNDS, ChunkLimit, Room
from weft.engine.scheduling.iteration_cost import IterationCost, Load, load_of
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable

LEAST_SHARE = 16
"""of the dense batch, one part, goes to prompts in any case"""


class _Formed(NamedTuple):
    """An iteration that is not done yet."""

    load: Load
    bound: str
    decodes: Load


class Cut:
    """The prompts of one iteration that is being formed. Tokens are given in the order in which they are asked for."""

    def __init__(self, limit: ChunkLimit, room: Room, share: float) -> None:
        """`share`: of the time for prompts, at most, for those that go before their turn."""
        self._limit, self._room, self._share = limit, room, share
        self._load = room.decodes
        self._least = room.least
        self.early = False
        """what is asked for now goes before its turn"""
        self.bound = ""
        """of `BOUNDS`, once there was no more"""

    def most(self, context: int, tokens: int) -> int:
        """How many of a prompt's `tokens`, behind `context` of its own, this iteration computes."""
        if self.bound or tokens <= 0:
            return 0
        limit, target, least = self._limit, self._room.target, self._least
        if self.early:
            alone = limit.cost.seconds(self._room.decodes)
            if alone >= target:
                return 0
            target, least = alone + self._share * (target - alone), 0
        fits = limit.fits(self._load, target, context, tokens)
        allowed = min(tokens, max(fits, least))
        if allowed < tokens and not self.early:
            self.bound = "slo" if fits >= least else "waited" if self._room.waited else "least"
        return allowed

    def took(self, context: int, tokens: int) -> None:
        load = self._load
        self._load = load._replace(
            tokens=load.tokens + tokens, pairs=load.pairs + self._limit.pairs(context, tokens), chunks=load.chunks + 1
        )
        if not self.early:
            self._least = max(0, self._least - tokens)


class ChunkKeeper:
    """Between the scheduler, which asks for a `Cut`, and what is measured of its iterations."""

    def __init__(
        self, limit: ChunkLimit, costs: Costs, slots: SlotTable, share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.limit = limit
        self._costs, self._slots, self._share, self._clock = costs, slots, share, clock
        self._formed: dict[int, _Formed] = {}
        """by step"""
        self._since: dict[int, float] = {}
        """by handle, of prompts under way that are or were first in line: since when"""
        self._cut: Cut | None = None
        self.bounds = dict.fromkeys(BOUNDS, 0)
        """iterations whose prompts were cut short, by what"""

    @classmethod
    def of(
        cls, objective: Objective, others: Sequence[Objective], costs: Costs, slots: SlotTable, *, most: int,
        chunk_step: int, patience: float, share: float, clock: Callable[[], float] = time.monotonic,
    ) -> ChunkKeeper:  # fmt: skip
        """`others`: percentiles of `--slo`, which the number of seats keeps second by second; the shortest limit is
        kept."""
        shortest = min([objective, *others], key=lambda o: o.limit)
        limit = ChunkLimit(
            objective._replace(limit=shortest.limit), IterationCost(costs), costs,
            least=max(chunk_step, most // LEAST_SHARE), most=most, patience=patience,
            each_second=bool(others),
        )  # fmt: skip
        return cls(limit, costs, slots, share, clock)

    def __str__(self) -> str:
        """For the log."""
        limit = self.limit
        return (
            f"prompts beside decodes are cut to keep {limit.objective}: to {limit.least} tokens an iteration at least, "
            f"and to more once one has been first in line for {limit.patience:g} s"
        )

    def cut(self, decodes: I32, in_turn: Sequence[Request]) -> Cut | None:
        """For an iteration with these slots' decodes; `in_turn`: prompts under way, the first in line first. None:
        nobody is made to wait, so nothing is cut."""
        s, now, self._cut = self._slots, self._clock(), None
        handles = [request.handle for request in in_turn]
        self._since = {handle: since for handle, since in self._since.items() if handle in handles}
        waited = now - self._since.setdefault(handles[0], now) if handles else 0.0
        if not len(decodes) and not (s.phase == Phase.DECODE).any():
            return None
        load = Load(len(decodes), float(self._costs.all_seen(s.scheduled.take(decodes) + 1).sum()))
        self._cut = Cut(self.limit, self.limit.room(load, waited), self._share)
        return self._cut

    def formed(self, batch: Batch) -> None:
        """This is the iteration for which `cut` was asked."""
        load = load_of(batch, self._costs)
        bound = self._cut.bound if self._cut is not None else ""
        if bound:
            self.bounds[bound] += 1
        self._formed[batch.step] = _Formed(load, bound, Load(batch.num_decodes, load.seen))

    def committed(self, result: StepResult, first: bool) -> None:
        """An iteration is done. `first`: the device had nothing to do before it."""
        formed = self._formed.pop(result.batch.step, None)
        if formed is None:
            return
        seconds = result.seconds + (0.0 if first else result.idle_seconds)
        self.limit.observe(formed.load, seconds, formed.bound)

    @property
    def cuts(self) -> bool:
        """The prompts of the iteration formed last were cut short: the next one is theirs."""
        return self._cut is not None and bool(self._cut.bound)

    def part_of_decodes(self, step: int) -> float:
        """Of the time of an iteration that is not committed: what it would have taken with no more prompts than there
        are in any case. For who answers for the number of decodes."""
        formed = self._formed.get(step)
        if formed is None or not self.limit.cost.measured:
            return 1.0
        prompts, least = formed.load.tokens - formed.decodes.tokens, self.limit.least
        if prompts <= least:
            return 1.0
        few = formed.decodes._replace(
            tokens=formed.decodes.tokens + least, pairs=formed.load.pairs * least / prompts, chunks=1
        )
        whole = self.limit.cost.seconds(formed.load)
        return min(1.0, self.limit.cost.seconds(few) / whole) if np.isfinite(whole) and whole > 0 else 1.0
