"""`Outbox`: reports that no iteration brings, and the message that carries them with a commit's events."""

from __future__ import annotations

import numpy as np

from weft.engine.scheduling.events import Events
from weft.engine.wire.messages import EngineStats, Finish, Outputs


class Outbox:
    """Collects refusals, charges and progress of the plan until the next message."""

    def __init__(self) -> None:
        self.plan_moved = False
        """The number of pipelines that serve has changed since the last message."""
        self.joules: dict[int, float] = {}
        """Joules charged so far by handle, for metered requests of the iteration to be committed."""
        self._refused: list[tuple[int, str, Finish]] = []

    def refuse(self, handle: int, why: str, how: Finish) -> None:
        """End a request that has had no event."""
        self._refused.append((handle, why, how))

    @property
    def has_refusals(self) -> bool:
        return bool(self._refused)

    def outputs(self, events: Events, stats: EngineStats) -> Outputs:
        """Return the message with a commit's events and everything collected, and empty the outbox."""
        errors, joules = events.errors, self.joules
        self.joules, self.plan_moved = {}, False
        if refused := self._refused:
            self._refused = []
            for how in (Finish.REFUSED, Finish.BUSY):
                events = events.ended([handle for handle, _, end in refused if end is how], how)
            errors = {**errors, **{handle: why for handle, why, _ in refused}}
        return Outputs(
            handles=events.handles.astype(np.int64, copy=False).tobytes(),
            tokens=events.tokens.astype(np.int32, copy=False).tobytes(),
            finish=events.finish.astype(np.uint8, copy=False).tobytes(),
            started=events.started,
            logprobs=events.logprobs,
            prompt_logprobs=events.prompt_logprobs,
            pooled=events.pooled,
            errors=errors,
            joules=joules,
            stats=stats,
        )
