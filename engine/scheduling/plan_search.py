"""`PlanSearch`: finds a plan for the engine's model and device while no request is open, and tries it on real ones.

Another process measures and solves (`weft.autosearch.background_search`). It may use the device only while the gate is
open, so the engine's loop never waits for it. The engine then prepares the pipelines between iterations, and compares
each with the serial plan in a `Trial`. If a part of it fails, the serial plan serves on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Protocol

import msgspec
from msgspec.structs import replace

from weft.engine.plans.found import MOST_BEGUN, Trials, Verdict
from weft.engine.plans.plan import Plan
from weft.engine.plans.trial import Trial, Work
from weft.engine.progress import notice
from weft.engine.runner.device.preparation import Preparation, Stage
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.listeners import Listener
from weft.engine.wire.messages import SearchStats
from weft.engine.wire.search_gate import SearchGate

IDLE_SECONDS = 5.0  # Seconds without a request after which `idle` searches.
QUIET_SECONDS = 0.05  # Seconds without a request after which `now` searches.
BUDGET_SECONDS = 540.0  # Seconds of searching. The process keeps to them; the engine ends it after twice as many.
ATTEMPTS = 2  # Searching processes that may end without a result.
SAFE_ITERATIONS = 16  # Iterations of its pipelines after which a trial counts as survived.
POLL_SECONDS = 0.1  # Seconds between looks at the process while the engine is idle.

Mode = Literal["idle", "now"]


class State(Enum):
    WAITING = "waiting"
    """For requests to end."""
    SEARCHING = "searching"
    PREPARING = "preparing"
    """Kernels of the found plan are compiled and captured."""
    TRYING = "trying"
    KEPT = "kept"
    """A found plan serves."""
    SERIAL = "serial"
    """The serial plan is best."""
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (State.KEPT, State.SERIAL, State.FAILED)


class Spent(msgspec.Struct, tag="spent", frozen=True):
    """What the search has taken so far, and what it does."""

    seconds: float
    joules: float = 0.0
    text: str = ""


class Found(msgspec.Struct, tag="found", frozen=True):
    """The result: a plan in the cache folder, verified; without pipelines if the serial plan is best."""

    plan: Plan
    trials: Trials


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The search cannot give a result here, so that another attempt would not either."""

    why: str


News = Spent | Found | Failed


class Searcher(Protocol):
    """The searching process."""

    def news(self) -> Sequence[News]:
        """Return what it has reported since the last call, without waiting."""
        ...

    @property
    def ended(self) -> str | None:
        """Why it has ended, once all of its news were taken; None while it runs."""
        ...

    def stop(self) -> None:
        """End it. Idempotent."""
        ...


class PlanDevice(Protocol):
    """The runner, as far as a found plan needs it."""

    def adopt(self, plan: Plan) -> Preparation:
        """Begin to prepare a plan's pipelines, none of which serves until it is ready. May raise anything."""
        ...

    def try_pipelines(self, chooses: Callable[[int, Batch], bool]) -> None:
        """Ask `chooses` for every iteration that a ready pipeline, given by number, fits: whether to run it."""
        ...


class Recorder:
    """Writes records in a thread, because a disk may hang."""

    def __init__(self, write: Callable[[Trials], None]) -> None:
        self._write = write
        self._jobs: queue.SimpleQueue[Trials] = queue.SimpleQueue()
        self.outcome: str | None = None  # "" once the last record is on the disk, or why it is not.
        self._thread: threading.Thread | None = None

    def record(self, trials: Trials) -> None:
        self.outcome = None
        self._jobs.put(trials)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-trials", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            trials = self._jobs.get()
            try:
                self._write(trials)
                outcome = ""
            except Exception as error:  # of a broken disk; the record is for later starts only
                outcome = str(error)
            if self._jobs.empty():
                self.outcome = outcome


class PlanSearch(Listener):
    """The search of one engine, as a state machine that `on_step` advances."""

    def __init__(
        self, mode: Mode, search: Callable[[], Searcher], gate: SearchGate, device: PlanDevice, recorder: Recorder,
        has_work: Callable[[], bool], *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """search: starts the process; it may raise `OSError`. has_work: whether requests are open."""
        self._search, self._gate, self._device, self._recorder = search, gate, device, recorder
        self._has_work, self._clock = has_work, clock
        self._quiet = IDLE_SECONDS if mode == "idle" else QUIET_SECONDS
        self._idle_since: float | None = None
        self._asleep = False
        self._searcher: Searcher | None = None
        self._attempts = 0
        self._opened = 0.0  # Seconds for which the gate was open.
        self._open_since = 0.0
        self._before = Spent(0.0)  # By processes that have ended.
        self._spent = Spent(0.0)
        self._plan: Plan | None = None
        self._preparation: Preparation | None = None
        self._trials = Trials("")
        self._of_pipeline: dict[int, Trial] = {}
        self._planned = 0  # Iterations that ran a pipeline in a trial.
        self._used: set[int] = set()  # Steps of such iterations in flight.
        self._changed = True
        self.state, self.why = State.WAITING, ""
        notice(f"search: a plan is searched for after {self._quiet:g} s without requests")

    # -- the engine's loop

    def on_step(self) -> None:
        now, busy = self._clock(), self._has_work()
        self._idle_since = None if busy else self._idle_since if self._idle_since is not None else now
        quiet = self._idle_since is not None and now - self._idle_since >= self._quiet and not self._asleep
        match self.state:
            case State.WAITING if quiet:
                self._begin()
            case State.SEARCHING:
                self._listen(now)
            case State.PREPARING:
                self._prepare()
        self._let(quiet and self.state is State.SEARCHING, now)

    def on_result(self, result: StepResult, _now: float) -> None:
        if self.state is not State.TRYING:
            return
        step = result.batch.step
        if step in self._used:
            self._used.discard(step)
            self._planned += 1
            if self._planned == SAFE_ITERATIONS:
                self._trials = replace(self._trials, begun=0)
                self._recorder.record(self._trials)
        for number, trial in self._of_pipeline.items():
            if trial.ended(step, result.seconds):
                self._decided(number, trial)

    def has_news(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def pause(self) -> float | None:
        if self.state.final or self.state is State.TRYING:
            return None
        return POLL_SECONDS

    def on_sleep(self) -> None:
        """End the process, which uses memory that another model may need. Its measurements are on the disk."""
        self._asleep = True
        self._let(False, self._clock())
        if self.state is State.SEARCHING:
            self._attempts -= 1
            self._stop()
            self._to(State.WAITING, "stops while the model sleeps")

    def on_wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self._let(False, self._clock())
        self._stop()

    def stats(self) -> dict[str, Any]:
        won = [v.gain for v in self._trials.verdicts.values() if v.kept]
        tried = sum(trial.pairs for trial in self._of_pipeline.values())
        return {
            "search": SearchStats(
                states={self.state.value: 1},
                seconds=self.spent.seconds,
                joules=self.spent.joules,
                gains={str(i): gain for i, gain in enumerate(won)},
                pairs=tried,
            )
        }

    @property
    def spent(self) -> Spent:
        """What all processes have taken."""
        a, b = self._before, self._spent
        return Spent(a.seconds + b.seconds, a.joules + b.joules, b.text)

    # -- states

    def _to(self, state: State, line: str, why: str = "") -> None:
        self.state, self.why, self._changed = state, why, True
        notice(f"search: {line}")

    def _let(self, opened: bool, now: float) -> None:
        if opened == self._gate.is_open:
            return
        if opened:
            self._open_since = now
            self._gate.open()
        else:
            self._opened += now - self._open_since
            self._gate.close()

    def _fail(self, why: str) -> None:
        self._let(False, self._clock())
        self._stop()
        self._to(State.FAILED, f"the serial plan serves: {why}", why)

    def _begin(self) -> None:
        if self._attempts == ATTEMPTS:
            self._fail(f"{ATTEMPTS} searches have ended without a result")
            return
        self._attempts += 1
        try:
            self._searcher = self._search()
        except OSError as error:
            self._fail(f"the searching process cannot be started: {error}")
            return
        self._to(State.SEARCHING, "begins")

    def _stop(self) -> None:
        searcher, self._searcher = self._searcher, None
        if searcher is not None:
            searcher.stop()
        self._before, self._spent = self.spent, Spent(0.0)

    def _listen(self, now: float) -> None:
        assert self._searcher is not None
        for news in self._searcher.news():
            match news:
                case Spent():
                    self._spent = news
                case Failed(why):
                    self._fail(why)
                    return
                case Found(plan, trials):
                    self._stop()
                    self._found(plan, trials)
                    return
        opened = self._opened + (now - self._open_since if self._gate.is_open else 0.0)
        if max(opened, self.spent.seconds) > 2 * BUDGET_SECONDS:
            self._fail(f"the search has taken {max(opened, self.spent.seconds):.0f} s")
            return
        if (ended := self._searcher.ended) is not None:
            self._let(False, now)
            self._stop()
            self._to(State.WAITING, f"ended without a result: {ended}")

    def _found(self, plan: Plan, trials: Trials) -> None:
        self._let(False, self._clock())
        self._plan, self._trials = plan, trials
        took = f"{self.spent.seconds:.0f} s and {self.spent.joules / 1e3:.0f} kJ"
        if not plan.periods:
            self._to(State.SERIAL, f"no pipeline beats the serial plan, after {took}")
            return
        if len(trials.verdicts) == len(plan.periods) and not any(v.kept for v in trials.verdicts.values()):
            self._to(State.SERIAL, "an earlier trial found the serial plan faster")
            return
        if trials.begun >= MOST_BEGUN:
            self._fail(f"engines have ended in {trials.begun} trials of the found plan")
            return
        try:
            self._preparation = self._device.adopt(plan)
        except Exception as error:  # of torch, Triton or the driver
            self._fail(f"the found plan cannot be prepared: {type(error).__name__}: {error}")
            return
        gains = ", ".join(f"{100 * (p.figures.get('gain', 1.0) - 1):.1f} %" for p in plan.periods)
        self._to(State.PREPARING, f"found {len(plan.periods)} pipelines that gain {gains} when measured, after {took}")

    def _prepare(self) -> None:
        """Wait until the pipelines are ready. Before they serve, the disk knows that they are tried."""
        assert self._preparation is not None
        if not self._preparation.done:
            return
        ready = [i for i, stage in enumerate(self._preparation.stages) if stage is Stage.SERVING]
        if not ready:
            self._fail("no pipeline of the found plan could be prepared")
            return
        if not self._of_pipeline:
            self._of_pipeline = {i: Trial() for i in ready if i not in self._trials.verdicts}
            for i, verdict in self._trials.verdicts.items():
                self._of_pipeline[i] = Trial()
                self._of_pipeline[i].kept = verdict.kept
            self._trials = replace(self._trials, begun=self._trials.begun + 1)
            self._recorder.record(self._trials)
        if (outcome := self._recorder.outcome) is None:
            return
        if outcome:
            self._fail(f"the trial cannot be recorded: {outcome}")
            return
        self._device.try_pipelines(self._chooses)
        self._to(State.TRYING, f"{len(ready)} pipelines are tried on iterations of requests, alternating")

    def _chooses(self, number: int, batch: Batch) -> bool:
        kv_tokens = int(batch.kv_len[: batch.num_decodes].sum())
        used = self._of_pipeline[number].launched(batch.step, Work(batch.num_tokens, kv_tokens))
        if used and self.state is State.TRYING:
            self._used.add(batch.step)
        return used

    def _decided(self, number: int, trial: Trial) -> None:
        assert trial.kept is not None
        assert self._plan is not None
        verdict = Verdict(trial.kept, trial.gain, trial.error if trial.pairs > 1 else 0.0, trial.pairs)
        self._trials = replace(self._trials, verdicts={**self._trials.verdicts, number: verdict})
        self._recorder.record(self._trials)
        period = self._plan.periods[number]
        what = "is kept" if trial.kept else "is dropped"
        notice(f"search: the pipeline for {period.min_tokens} to {period.tokens} tokens {what}: {trial.text}")
        self._changed = True
        if all(trial.kept is not None for trial in self._of_pipeline.values()):
            kept = sum(trial.kept is True for trial in self._of_pipeline.values())
            if kept:
                self._to(State.KEPT, f"{kept} of {len(self._of_pipeline)} pipelines serve from now on")
            else:
                self._to(State.SERIAL, "the serial plan is faster on real requests, and serves")
