"""`Notices`: what an engine has to tell though no iteration said it, and the message that tells all there is."""

from __future__ import annotations

import numpy as np

from weft.engine.memory.tiers import Tiers
from weft.engine.scheduling.events import Events
from weft.engine.wire.messages import EngineStats, Finish, Outputs


class Notices:
    """Refusals, a plan that is further, tiers that went down or came to rest: each is told once."""

    def __init__(self, tiers: Tiers | None, plan_moved: bool) -> None:
        self.plan_moved = plan_moved
        """where the plan's pipelines are has changed, and nobody has been told"""
        self._tiers = tiers
        self._refused: list[tuple[int, str, Finish]] = []
        self._ssd_up = tiers is not None and tiers.ssd.store is not None
        self._told_bytes_moved = 0

    def refuse(self, handle: int, why: str, how: Finish) -> None:
        """A request gets no other event."""
        self._refused.append((handle, why, how))

    @property
    def has_refusals(self) -> bool:
        return bool(self._refused)

    def due(self) -> bool:
        """There is something to tell who watches an idle engine. Who asks tells it: of tiers it is said once."""
        news = self._tier_went_down() or self._tiers_came_to_rest()
        return news or self.plan_moved or self.has_refusals

    def _tier_went_down(self) -> bool:
        up = self._tiers is None or self._tiers.ssd.store is not None
        went_down = self._ssd_up and not up
        self._ssd_up = up
        return went_down

    def _tiers_came_to_rest(self) -> bool:
        """Pages were moved while nobody was told of anything, and none is under way now."""
        tiers = self._tiers
        if tiers is None or tiers.num_transfers or tiers.bytes_moved == self._told_bytes_moved:
            return False
        self._told_bytes_moved = tiers.bytes_moved
        return True

    def outputs(self, events: Events, stats: EngineStats, joules: dict[int, float]) -> Outputs:
        """A commit's events, and what is to be told beside them."""
        refused, self._refused, self.plan_moved = self._refused, [], False
        for how in (Finish.REFUSED, Finish.BUSY):
            events = events.ended([handle for handle, _, end in refused if end is how], how)
        return Outputs(
            handles=events.handles.astype(np.int64).tobytes(),
            tokens=events.tokens.astype(np.int32).tobytes(),
            finish=events.finish.astype(np.uint8).tobytes(),
            started=events.started,
            logprobs=events.logprobs,
            prompt_logprobs=events.prompt_logprobs,
            pooled=events.pooled,
            errors={**events.errors, **{handle: why for handle, why, _ in refused}},
            joules=joules,
            stats=stats,
        )
