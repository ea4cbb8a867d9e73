"""`Listener`: the points of the engine's loop at which a feature can act; `Listeners`: the hooks to call at each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from weft.engine.runner.device.runner import InFlight
from weft.engine.runner.iteration.batch import Batch, StepResult


class Listener:
    """A feature of the engine. It overrides the hooks it needs; the loop calls no others."""

    def launch_at(self, _running: Batch | None, /) -> float:
        """Return the time at which to launch the iteration after `running`; 0 for at once."""
        return 0.0

    def on_step(self) -> None:
        """Act before a step begins."""

    def on_schedule(self) -> None:
        """Act before the scheduler forms an iteration."""

    def on_busy(self, step: int, now: float, /) -> None:
        """Note that the device gets its first iteration, `step`, after a time without requests."""

    def on_launch(self, batch: Batch, host_seconds: float, /) -> None:
        """Note that a batch was launched. `host_seconds` is the time it took to schedule and launch."""

    def on_wait(self, in_flight: InFlight, /) -> None:
        """Act before the engine waits for an iteration to end."""

    def on_result(self, result: StepResult, now: float, /) -> None:
        """Take in an iteration that has ended and is not committed yet."""

    def on_commit(self, busy: bool, /) -> None:
        """Act after a commit. `busy` is False if no request is open and nothing is in flight."""

    def on_step_end(self) -> None:
        """Act after a step."""

    def on_blocked(self, _seconds: float, /) -> bool:
        """Wait up to this many seconds for work that runs elsewhere. Return False if there is none."""
        return False

    def has_news(self) -> bool:
        """Return True, once, if clients need a message although no iteration has ended."""
        return False

    def on_idle(self, _now: float, /) -> bool:
        """Idle tick: no request is open. Return True if clients need new statistics."""
        return False

    def pause(self) -> float | None:
        """Return the longest time in seconds before the next step while no request is open; None: any time."""
        return None

    def on_sleep(self) -> None:
        """Act after the model has given its memory back."""

    def on_wake(self) -> None:
        """Act after the model has taken its memory again."""

    def stats(self) -> dict[str, Any]:
        """Return this feature's fields of `EngineStats`."""
        return {}

    def drain(self) -> None:
        """Wait for everything that the feature has started."""

    def close(self) -> None:
        """Release the feature's resources: the engine ends."""


Found = TypeVar("Found", bound=Listener)


class Listeners:
    """Keeps one list of bound methods per hook, so that features that are off cost nothing in an iteration."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = list(listeners)
        self._collect()

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self._collect()

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener. One that is not in the list is ignored."""
        self._listeners = [other for other in self._listeners if other is not listener]
        self._collect()

    def find(self, kind: type[Found]) -> Found | None:
        return next((own for own in self._listeners if isinstance(own, kind)), None)

    def _collect(self) -> None:
        def using(hook: str) -> list[Listener]:
            return [own for own in self._listeners if getattr(type(own), hook) is not getattr(Listener, hook)]

        self.launch_at = [own.launch_at for own in using("launch_at")]
        self.on_step = [own.on_step for own in using("on_step")]
        self.on_schedule = [own.on_schedule for own in using("on_schedule")]
        self.on_busy = [own.on_busy for own in using("on_busy")]
        self.on_launch = [own.on_launch for own in using("on_launch")]
        self.on_wait = [own.on_wait for own in using("on_wait")]
        self.on_result = [own.on_result for own in using("on_result")]
        self.on_commit = [own.on_commit for own in using("on_commit")]
        self.on_step_end = [own.on_step_end for own in using("on_step_end")]
        self.on_blocked = [own.on_blocked for own in using("on_blocked")]
        self.has_news = [own.has_news for own in using("has_news")]
        self.on_idle = [own.on_idle for own in using("on_idle")]
        self.pause = [own.pause for own in using("pause")]
        self.on_sleep = [own.on_sleep for own in using("on_sleep")]
        self.on_wake = [own.on_wake for own in using("on_wake")]
        self.stats = [own.stats for own in using("stats")]
        self.drain = [own.drain for own in using("drain")]
        self.close = [own.close for own in using("close")]
