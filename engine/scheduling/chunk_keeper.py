"""`ChunkKeeper`: cuts the prompts of each iteration so that the time between tokens stays within its objective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.engine.config import Objective
from weft.engine.runner.iteration.batch import I32, Batch, StepResult
from weft.engine.runner.iteration.cost_shares import Costs
from weft.engine.scheduling.chunk_limit import BOUNDS, ChunkLimit, Headroom
from weft.engine.scheduling.iteration_cost import IterationCost, Load, load_of
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable

LEAST_SHARE = 16  # prompts get at least the dense batch divided by this


class _Formed(NamedTuple):
    """An iteration that has been launched and is not done yet."""

    load: Load
    bound: str
    decodes: Load


class Cut:
    """The token budget for prompts of one iteration. Prompts must take tokens in their order."""

    def __init__(self, limit: ChunkLimit, headroom: Headroom, share: float) -> None:
        """`share` limits the time for prompts that run before their turn, as a fraction of the time for prompts."""
        self._limit, self._headroom, self._share = limit, headroom, share
        self._load = headroom.decodes
        self._least = headroom.least
        self.early = False  # the next prompts run ahead of their turn
        self.bound = ""  # the entry of `BOUNDS` that cut a prompt short; empty if none was

    def most(self, context: int, tokens: int) -> int:
        """Return how many of a prompt's `tokens`, after `context` computed ones, this iteration may compute."""
        if self.bound or tokens <= 0:
            return 0
        limit, target, least = self._limit, self._headroom.target, self._least
        if self.early:
            alone = limit.cost.seconds(self._headroom.decodes)
            if alone >= target:
                return 0
            target, least = alone + self._share * (target - alone), 0
        fits = limit.fits(self._load, target, context, tokens)
        allowed = min(tokens, max(fits, least))
        if allowed < tokens and not self.early:
            self.bound = "slo" if fits >= least else "waited" if self._headroom.waited else "least"
        return allowed

    def took(self, context: int, tokens: int) -> None:
        load = self._load
        self._load = load._replace(
            tokens=load.tokens + tokens, pairs=load.pairs + self._limit.pairs(context, tokens), chunks=load.chunks + 1
        )
        if not self.early:
            self._least = max(0, self._least - tokens)


class ChunkKeeper(Listener):
    """Gives the scheduler a `Cut` per iteration and learns from how long iterations take."""

    def __init__(
        self, limit: ChunkLimit, costs: Costs, slots: SlotTable, share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.limit = limit
        self._costs, self._slots, self._share, self._clock = costs, slots, share, clock
        self._formed: dict[int, _Formed] = {}  # iterations in flight, by step
        self._since: dict[int, float] = {}  # when each prompt in progress, by handle, became first in order
        self._cut: Cut | None = None
        self._first_step = 0  # first step after the device had no work: idle time before it does not count
        self.bounds = dict.fromkeys(BOUNDS, 0)  # iterations whose prompts were cut short, by reason

    @classmethod
    def of(
        cls, objective: Objective, others: Sequence[Objective], costs: Costs, slots: SlotTable, *, most: int,
        chunk_step: int, patience: float, share: float, clock: Callable[[], float] = time.monotonic,
    ) -> ChunkKeeper:  # fmt: skip
        """`others` are percentiles of `--slo` that the slot limit keeps second by second. The shortest limit counts."""
        shortest = min([objective, *others], key=lambda o: o.limit)
        limit = ChunkLimit(
            objective._replace(limit=shortest.limit), IterationCost(costs), costs,
            least=max(chunk_step, most // LEAST_SHARE), most=most, patience=patience,
            each_second=bool(others),
        )  # fmt: skip
        return cls(limit, costs, slots, share, clock)

    def __str__(self) -> str:
        limit = self.limit
        return (
            f"chunks next to decodes are limited to keep {limit.objective}: at least {limit.least} tokens per "
            f"iteration, more once a prompt has been first in line for {limit.patience:g} s"
        )

    def cut(self, decodes: I32, in_turn: Sequence[Request]) -> Cut | None:
        """Return the budget of an iteration with these decode slots; None if no request decodes. `in_turn` are the
        prompts in progress, in order."""
        s, now, self._cut = self._slots, self._clock(), None
        handles = [request.handle for request in in_turn]
        self._since = {handle: since for handle, since in self._since.items() if handle in handles}
        waited = now - self._since.setdefault(handles[0], now) if handles else 0.0
        if not len(decodes) and not (s.phase == Phase.DECODE).any():
            return None
        load = Load(len(decodes), float(self._costs.all_seen(s.scheduled.take(decodes) + 1).sum()))
        self._cut = Cut(self.limit, self.limit.headroom(load, waited), self._share)
        return self._cut

    def formed(self, batch: Batch) -> None:
        """Note the iteration that the last `cut` was for."""
        load = load_of(batch, self._costs)
        bound = self._cut.bound if self._cut is not None else ""
        if bound:
            self.bounds[bound] += 1
        self._formed[batch.step] = _Formed(load, bound, Load(batch.num_decodes, load.seen))

    def on_busy(self, step: int, _now: float) -> None:
        self._first_step = step

    def on_result(self, result: StepResult, _now: float) -> None:
        step = result.batch.step
        formed = self._formed.pop(step, None)
        if formed is None:
            return
        seconds = result.seconds + (0.0 if step == self._first_step else result.idle_seconds)
        self.limit.observe(formed.load, seconds, formed.bound)

    @property
    def cuts(self) -> bool:
        """The prompts of the last iteration were cut short, so the next iteration is theirs."""
        return self._cut is not None and bool(self._cut.bound)

    def share_of_decodes(self, step: int) -> float:
        """Return the fraction of an uncommitted iteration's time that it would need with the minimum of prompts. The
        slot limit accounts for that fraction only."""
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
