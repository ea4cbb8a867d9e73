"""The bench of several GPUs: every rank measures the same, and a rank that exits is reported in one line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from follower_of_formulas import Formulas
from synthetic import TYPICAL

from weft.autosearch import ranks_bench
from weft.autosearch.ranks_bench import RanksBench
from weft.autosearch.refine import serial_for
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError, RankLost
from weft.engine.model.directory import read_spec
from weft.engine.plans.plan import NanoOperation

MODEL = PRESETS / "llama-3-70b"
SPEC = read_spec(MODEL).shard(0, 2)
PRODUCT = NanoOperation("gate_up", 0, 2048, 116)
SUM = NanoOperation("o_reduce", 0, 2048, 16, "network")


@pytest.mark.slow
def test_all_ranks_measure_the_same_until_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    monkeypatch.setattr(ranks_bench, "MODULE", "follower_of_formulas")
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    reported = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(reported))
    own = Formulas(SPEC)
    bench = RanksBench(
        MODEL, 2, max_tokens=2048, max_context=2048, seconds=0.2, tuning_seconds=0.0, open_own=lambda *_: own
    )
    try:
        assert bench.alone(SUM, TYPICAL) == Formulas(SPEC).alone(SUM, TYPICAL)
        assert bench.pair(PRODUCT, SUM, TYPICAL) == Formulas(SPEC).pair(PRODUCT, SUM, TYPICAL)
        with pytest.raises(ConfigError, match="more SMs"):  # everywhere
            bench.alone(NanoOperation("gate_up", 0, 2048, 133), TYPICAL)
        bench.seconds = 0.5
        assert bench.period(serial_for(SPEC, TYPICAL, 132), TYPICAL).ms > 0
        assert until(lambda: read(reported).endswith("period 3 0.5\n"))
        assert read(reported).split("\n")[:-1] == [
            "alone 1 0.0", "pair 2 0.0", "alone 2 0.0", "seconds 2 0.5", "period 3 0.5"
        ]  # fmt: skip
        bench._followers[1].kill()
        with pytest.raises(RankLost, match="rank 1: its process ended"):
            assert until(lambda: bench.alone(SUM, TYPICAL).ms < 0)
    finally:
        bench.close()
    assert bench._followers[1].returncode is not None


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
