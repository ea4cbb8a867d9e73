"""Features of the engine that act at points of its loop: one small `Listener` each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weft.engine.memory.index_events import IndexEvents, PageLedger
from weft.engine.memory.tiers import Tiers
from weft.engine.progress import notice
from weft.engine.runner.device.image_rows import ImageRows
from weft.engine.runner.device.preparation import Preparation
from weft.engine.runner.device.runner import InFlight
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.energy_ledger import EnergyLedger
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.grammars import Grammars
from weft.engine.scheduling.images import Images
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.wire.heartbeat import HEARTBEAT_SECONDS, Heartbeat, LastStep

VOCABULARY_SECONDS = 0.5  # seconds from an engine's first idle tick until it reads the vocabulary for grammars
LOAD_POLL_SECONDS = 0.002  # seconds between steps while pages are fetched for a request that has not arrived yet
ENERGY_REPORT_SECONDS = 1.0  # seconds between reports of the energy that an idle engine draws
NONFINITE_LINE_SECONDS = 60.0  # seconds between log lines about logits that were not finite


class CompiledGrammars(Listener):
    """Queues requests whose grammar is compiled and refuses those whose grammar cannot be used."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler, outbox: Outbox) -> None:
        self._grammars, self._scheduler, self._outbox = grammars, scheduler, outbox
        self._idle_since: float | None = None

    def on_schedule(self) -> None:
        for request, refusal, how in self._grammars.compiled():
            if refusal is None:
                self._scheduler.add(request)
            else:
                self._outbox.refuse(request.handle, refusal, how)

    def on_blocked(self, seconds: float) -> bool:
        return self._grammars.wait(seconds)

    def on_idle(self, now: float) -> bool:
        # Not while clients connect, and before the first grammar needs it.
        self._idle_since = self._idle_since or now
        if now - self._idle_since >= VOCABULARY_SECONDS:
            self._grammars.read_vocabulary()
        return False

    def close(self) -> None:
        self._grammars.close()


class TierTransfers(Listener):
    """Stores pages in the lower tiers while an iteration computes, and reports loads and a tier that fails or works."""

    def __init__(self, tiers: Tiers, drain_engine: Callable[[], None]) -> None:
        self._tiers, self._drain_engine = tiers, drain_engine
        self._ssd_up = tiers.ssd.store is not None
        self._reported_bytes = 0

    def on_commit(self, _busy: bool) -> None:
        self._tiers.begin_stores()

    def on_blocked(self, seconds: float) -> bool:
        self._tiers.wait(seconds)
        return True

    def has_news(self) -> bool:
        """Return True if the SSD tier fails or works again, or if pages were moved since the last report and none moves
        now."""
        tiers = self._tiers
        changed = self._ssd_up != (tiers.ssd.store is not None)
        self._ssd_up = tiers.ssd.store is not None
        settled = not tiers.num_transfers and tiers.bytes_moved != self._reported_bytes
        if settled and not changed:
            self._reported_bytes = tiers.bytes_moved
        return changed or settled

    def pause(self) -> float | None:
        return LOAD_POLL_SECONDS if self._tiers.num_loading else None

    def stats(self) -> dict[str, Any]:
        return {"load_seconds": self._tiers.take_load_seconds()}

    def drain(self) -> None:
        self._tiers.drain()

    def close(self) -> None:
        self._drain_engine()
        self._tiers.close()


class PlanPreparation(Listener):
    """Prepares the plan's pipelines between iterations."""

    def __init__(self, preparation: Preparation, has_work: Callable[[], bool], outbox: Outbox) -> None:
        self._preparation, self._has_work, self._outbox = preparation, has_work, outbox
        outbox.pipelines_changed = self.pause() is not None

    def on_step(self) -> None:
        if self._preparation.advance(busy=self._has_work()):
            self._outbox.pipelines_changed = True

    def pause(self) -> float | None:
        return self._preparation.pause

    def stats(self) -> dict[str, Any]:
        return {"plan": self._preparation.stats}


class EnergyCharges(Listener):
    """Charges requests for the energy of their iterations, and reports once a second what an idle engine draws."""

    def __init__(self, ledger: EnergyLedger, outbox: Outbox, *, shares_device: bool) -> None:
        """`shares_device`: another engine uses the device while this one sleeps."""
        self._ledger, self._outbox, self._shares_device = ledger, outbox, shares_device
        self.source, self.missing = ledger.source, ""
        self._reported = 0.0

    def on_busy(self, _step: int, now: float) -> None:
        self._ledger.working(now, True)

    def on_result(self, result: StepResult, _now: float) -> None:
        self._outbox.joules = self._ledger.charge(result.batch, result.seconds)

    def on_commit(self, busy: bool) -> None:
        if not busy:
            self._ledger.working(time.monotonic(), False)

    def on_idle(self, now: float) -> bool:
        if now - self._reported < ENERGY_REPORT_SECONDS:
            return False
        self._reported = now
        self._ledger.working(now, False)
        self._ledger.settle()
        return True

    def on_sleep(self) -> None:
        if self._shares_device:
            self._ledger.suspend()

    def on_wake(self) -> None:
        self._ledger.resume()

    def stats(self) -> dict[str, Any]:
        return {"energy": self._ledger.stats()}

    def close(self) -> None:
        self._ledger.close()


class Unmetered(Listener):
    """Takes the place of `EnergyCharges` if energy cannot be measured. `missing` is the reason."""

    def __init__(self, missing: str) -> None:
        self.source, self.missing = "", missing


class KvEvents(Listener):
    """Publishes the pages that each step has added to the tiers or removed from them."""

    def __init__(self, events: IndexEvents) -> None:
        self._events = events

    def on_step_end(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class PageReports(Listener):
    """Reports to routers which pages entered and left the prefix index."""

    def __init__(self, ledger: PageLedger) -> None:
        self.ledger = ledger

    def stats(self) -> dict[str, Any]:
        return {"pages": self.ledger.take()}


class ImageCache(Listener):
    """Frees the embeddings of images while the model sleeps, and reports statistics of images."""

    def __init__(self, images: Images, rows: ImageRows) -> None:
        self._images, self._rows = images, rows

    def on_blocked(self, seconds: float) -> bool:
        return self._rows.wait(seconds)

    def drain(self) -> None:
        self._rows.drain()

    def close(self) -> None:
        self._rows.close()

    def on_sleep(self) -> None:
        self._rows.drain()
        self._images.forget()
        self._rows.free()

    def stats(self) -> dict[str, Any]:
        return {"images": self._images.stats()}


class StepHeartbeat(Listener):
    """Shows a heartbeat while an iteration is awaited, until it has taken longer than the step timeout. GPUs can only
    be awaited to the end of an iteration, which takes milliseconds, so they show none meanwhile."""

    def __init__(self, heartbeat: Heartbeat, step_timeout: float) -> None:
        self._heartbeat, self._step_timeout = heartbeat, step_timeout

    def on_wait(self, in_flight: InFlight) -> None:
        batch = in_flight.batch
        self._heartbeat.step(
            LastStep(batch.step, batch.num_requests, batch.num_tokens, batch.num_decodes, in_flight.nano_batches)
        )
        begin = time.monotonic()
        while not in_flight.ends_within(HEARTBEAT_SECONDS):
            if time.monotonic() - begin < self._step_timeout:
                self._heartbeat.still()


class NonfiniteWarning(Listener):
    """Logs at most once a minute how many requests ended because their logits were not finite."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._logged = 0
        self._quiet_until = 0.0

    def on_commit(self, _busy: bool) -> None:
        total = self._scheduler.nonfinite_logits
        if total == self._logged or (now := time.monotonic()) < self._quiet_until:
            return
        notice(
            f"{total - self._logged} request(s) ended with 500 nonfinite_logits ({total} so far): "
            "the model computes NaN or inf; check the checkpoint, --dtype float16, and the device's memory"
        )
        self._logged, self._quiet_until = total, now + NONFINITE_LINE_SECONDS
