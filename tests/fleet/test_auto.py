"""`--max-num-seqs auto` in the simulator, with endless requests of one length.

It uses the shipped profile of an H200, whose GEMMs compute tiles of 128 tokens. Requests that began together end
together there, so seconds of prompts alternate with seconds of decodes alone, as on the real one (2026-11-24).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from weft.deploy.fleet.clock import Clock, Processor
from weft.deploy.fleet.engine import EngineOptions, SimulatedEngine, SimulatedOutputs, SimulatedRequest
from weft.deploy.fleet.profile import load_profile
from weft.engine.config import Objective
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.runner.iteration.cost_shares import GPU_TILE
from weft.engine.scheduling.iteration_cost import Load
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.slot_limit_keeper import Pace
from weft.server.daemon.cli import main

OBJECTIVE = Objective.parse("itl:p99:40ms")


@dataclass
class Second:
    value: float
    """fraction of answers within the objective"""
    tokens: int
    """tokens of answers"""


class Endless(Listener):
    """An engine with more requests of these lengths than it has slots; each is followed by the next."""

    def __init__(self, lengths: tuple[int, int], slots: int, *, auto: bool) -> None:
        self._lengths, self._handles = lengths, 0
        self._rng = np.random.default_rng(0)
        self.clock, profile = Clock(), load_profile("llama-3-8b-h200")
        options = EngineOptions(
            64, 14_000, slots, 2048, 8192, prefix_caching=False, itl_slo=OBJECTIVE, keeps=(OBJECTIVE,) if auto else ()
        )
        self.engine = SimulatedEngine(self.clock, Processor(self.clock), profile, options, self._heard)
        self._pace = Pace([], self.engine.scheduler.slots, 0.0)
        self._gaps: list[np.ndarray] = []
        self._answered = 0
        self.cut: list[int] = []
        """tokens of iterations whose prompts were cut"""
        keeper = self.engine.scheduler.chunk_keeper
        assert keeper is not None
        observe = keeper.limit.observe

        def watched(load: Load, seconds: float, bound: str) -> None:
            if bound == "slo":
                self.cut.append(load.tokens)
            observe(load, seconds, bound)

        keeper.limit.observe = watched  # type: ignore[method-assign]
        self.engine.listeners.add(self)
        for _ in range(slots + 32):
            self._ask()

    def on_result(self, result: StepResult, now: float) -> None:
        self._gaps.append(self._pace.committed(result.batch, now))

    def _ask(self) -> None:
        prompt, answer = self._lengths
        self._handles += 1
        self.engine.send(
            SimulatedRequest(self._handles, self._rng.integers(0, 1000, prompt).astype(np.int32), answer, True)
        )

    def _heard(self, received: SimulatedOutputs) -> None:
        self._answered += sum(token >= 0 for token in received.tokens)
        for _ in filter(None, received.finish):
            self._ask()

    def serve(self, seconds: int) -> list[Second]:
        rows: list[Second] = []

        def second() -> None:
            rows.append(Second(OBJECTIVE.of(np.concatenate(self._gaps)), self._answered))
            self._gaps, self._answered = [], 0
            if len(rows) == seconds:
                self.engine.kill()

        for at in range(1, seconds + 1):
            self.clock.at(float(at), second)
        self.clock.run()
        return rows


@pytest.mark.nightly
def test_requests_that_end_together_cost_no_slots() -> None:
    adapts, fixed = Endless((161, 200), 256, auto=True), Endless((161, 200), 256, auto=False)
    rows, others = adapts.serve(45), fixed.serve(45)
    assert adapts.engine.scheduler.slots.limit == 256
    assert adapts.engine.scheduler.slot_limit_changes["late"] == 0
    assert sum(row.tokens for row in rows[20:]) >= 0.95 * sum(row.tokens for row in others[20:])
    assert np.mean([row.value <= OBJECTIVE.limit for row in rows[10:]]) >= 0.99


def test_prompts_fill_tiles_and_do_not_spill_into_the_next() -> None:
    endless = Endless((1024, 512), 256, auto=True)
    rows = endless.serve(60)
    assert np.mean([row.value <= OBJECTIVE.limit for row in rows[15:]]) >= 0.99
    whole = np.array(endless.cut[100:]) % GPU_TILE == 0
    assert len(whole) > 300
    assert whole.mean() > 0.9


def test_the_command_accepts_auto_and_numbers_together(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--users", "20", "--duration", "3s", "--input", "64", "--output", "32", "--engines", "1", "--quiet"]
    assert main(["fleet", "--max-num-seqs", "auto:16,16", "--slo", "itl:p99:40ms", *load]) == 0
    out = capsys.readouterr().out
    assert "auto:16" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--max-num-seqs", "auto"], "--slo itl:p99:50ms"),
        (["--max-num-seqs", "auto", "--slo", "ttft:p99:1s"], "--slo itl:p99:50ms"),
        (["--max-num-seqs", "auto:many", "--slo", "itl:p99:40ms"], "'many' is not a whole number"),
        (["--max-num-seqs", "auto:0", "--slo", "itl:p99:40ms"], "at least 1"),
    ],
)
def test_an_impossible_auto_is_a_one_line_error(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--rate", "10", "--quiet", *flags]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
