"""The sweep of hybrid batches on a made-up card: measurements within a time, restarts, and the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from weft.kernels.attention.break_evens import TableKey, keep, read
from weft.kernels.tuning.measure import Meter, Sustained
from weft.tools.kernels.bench_attention import run
from weft.tools.kernels.hybrid_batches import KV_HEADS, Hybrid, balanced, best_splits, figures, paper, split_us, sweep
from weft.tools.kernels.hybrid_calls import TOGETHER, plan_lists
from weft.tools.kernels.hybrid_report import floor_lines, summary

MODELS = ("yi-6b", "llama-3-8b")
ABOUT = {"device": "made up"}
GAIN = 1.2
"""of one launch compared with our serial kernels"""


class Card:
    """Its time passes as the estimates predict."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


class CardCalls:
    def __init__(self, card: Card) -> None:
        self.card, self.left_out = card, dict[str, str]()
        self.batch: Hybrid | None = None

    def load(self, batch: Hybrid) -> dict[str, int]:
        self.batch = batch
        self.card.now += 0.004
        return {"parts": 1, "rule": 132, "all": 132, "few": 40, "half": 66}

    def names(self, every: bool) -> list[str]:
        assert self.batch is not None
        core = ["whole", "cut", "pod rule"] if self.batch.chunk else []
        more = ["pod few", "pod half", "decode", "prefill", "batched", "streams 32", "streams 48", "flash-attn"]
        return [n for n in (core + more if every else core) if n not in self.left_out]

    def prepare(self, name: str) -> bool:
        if name == "flash-attn":
            self.left_out[name] = "not installed"
        return name != "flash-attn"

    def _us(self, name: str) -> float:
        assert self.batch is not None
        serial = self.batch.prefill_us + self.batch.decode_us
        return {
            "pod rule": serial / GAIN, "pod few": serial / 1.3, "cut": serial / 1.05, "batched": 2 * serial,
            "decode": self.batch.decode_us, "prefill": self.batch.prefill_us,
        }.get(name, serial)  # fmt: skip

    def burst(self, name: str, expected_us: float) -> float:
        assert expected_us > 0
        self.card.now += 4 * 1.6e-6 * self._us(name) + 0.001
        return self._us(name)

    def sustained(self, name: str, meter: Meter, seconds: float, expected_us: float) -> Sustained:  # noqa: ARG002
        self.card.now += seconds
        return Sustained(self._us(name) * 1e-3, 690.0, 1500.0)

    def same_bits(self) -> bool:
        return True


class NoMeter(Meter):
    def __init__(self) -> None:
        self.samples = [(0.0, 1980.0, 500.0)]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures take seconds: one test draws them
    return Card()


def measured(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[1:]]


def test_the_paper_has_more_than_a_thousand_batches_and_each_half_counts() -> None:
    swept = sweep(MODELS)
    assert len(swept) == len(set(swept)) > 1000
    assert all(map(balanced, swept))
    assert {b.model for b in swept} == set(MODELS)
    assert {b.chunk for b in swept} == {128, 256, 512, 1024, 1536, 2048}
    assert (min(b.context for b in swept), max(b.context for b in swept)) == (4096, 20480)
    early = swept[:120]  # any prefix has some of each kind
    assert {(b.model, b.chunk) for b in early} == {(b.model, b.chunk) for b in swept}
    assert len({b.context for b in early}) > 10
    parts = [planned.part for planned in paper(MODELS)]
    assert {part.split(" chunk")[0] for part in parts} == {
        "sweep", "table 1 C0", "table 1 C1", "table 1 C2", "table 8", "figure 6", "figure 10", "figure 14",
    }  # fmt: skip


@pytest.mark.parametrize("planned", [*figures(MODELS)[::5], *paper(MODELS)[30::300]], ids=str)
def test_a_batchs_lists_cover_all_of_it_in_every_variant(planned: Any) -> None:
    batch = planned.batch
    plan, lists = plan_lists(batch, 132, 512 // batch.kv_heads)
    assert plan["rule"] == TOGETHER or 0 <= plan["rule"] <= 132
    decode, whole = lists["decode"], lists["whole"]
    assert (decode[:, 3] - decode[:, 2]).sum() == batch.decodes * batch.length
    assert whole[:, 1].sum() == batch.chunk
    for name, queries in (("cut", batch.chunk), ("streams", batch.chunk), ("batched", batch.chunk + batch.decodes)):
        items = lists[name]
        first = items[(items[:, 7] >> 16) == 0]  # one part of each tile
        assert first[:, 1].sum() == queries, name
        # keys of a tile's parts are those of the tile
        wanted = (first[:, 1] + first[:, 2]).sum()
        assert (items[:, 5] - items[:, 4]).sum() == wanted, name
    assert len(best_splits(batch)) == 2
    assert split_us(batch, best_splits(batch)[0]) <= split_us(batch, best_splits(batch)[1])


@pytest.mark.parametrize("seconds", [40.0, 250.0])
def test_a_sweep_ends_in_time_and_spreads_it(card: Card, tmp_path: Path, seconds: float) -> None:
    batches, begun = paper(MODELS), card.now
    calls = {model: CardCalls(card) for model in MODELS}
    assert run(batches, calls, tmp_path, ABOUT, seconds=seconds, hold=0.5, meter=NoMeter(), clock=card.monotonic) == 0
    assert card.now - begun <= seconds + 1
    rows = measured(tmp_path)
    swept = [r for r in rows if r["part"] == "sweep" and r["regime"] == "burst"]
    every = ["decode" in r["us"] for r in swept]
    assert any(r["regime"] == "sustained" for r in rows)
    if seconds == 250.0:
        assert len(swept) > 1000
        assert 0.1 < np.mean(every) <= 1
        assert abs(np.mean(every[: len(every) // 2]) - np.mean(every[len(every) // 2 :])) < 0.3
    assert all("flash-attn" not in r["us"] for r in rows)
    text = (tmp_path / "summary.txt").read_text()
    assert "flash-attn: not installed" in text
    assert "hfuse" in text
    assert not list(tmp_path.glob("*.png"))


def test_a_restart_resumes_after_the_last_whole_row(card: Card, tmp_path: Path, capsys: Any) -> None:
    batches = paper(MODELS)[:60]

    def sweep_once(seconds: float) -> int:
        calls = {model: CardCalls(card) for model in MODELS}
        return run(batches, calls, tmp_path, ABOUT, seconds=seconds, hold=0.0, meter=None, clock=card.monotonic)

    assert sweep_once(3.0) == 0
    before = measured(tmp_path)
    assert 0 < len(before) < len(batches)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "sw')  # killed while it wrote
    assert sweep_once(100.0) == 0
    rows = measured(tmp_path)
    assert rows[: len(before)] == before
    assert len(rows) == len({(r["part"], *(r[f] for f in Hybrid._fields)) for r in rows}) == len(batches)
    capsys.readouterr()
    assert run([], {}, tmp_path, {"device": "another"}, seconds=1, hold=0.0, meter=None) == 2
    assert "another card" in capsys.readouterr().out


def test_a_sweep_writes_break_evens_that_an_engine_can_read(card: Card, tmp_path: Path, capsys: Any) -> None:
    def made(model: str) -> TableKey:
        return TableKey("made up", 132, 32, KV_HEADS[model], 128, 64, "3.6.0", "abc")

    def swept(batches: list[Any], seconds: float, keep_in: Path) -> int:
        calls = {model: CardCalls(card) for model in MODELS}
        return run(
            batches, calls, tmp_path / "rows", ABOUT, seconds=seconds, hold=0.0, meter=None, clock=card.monotonic,
            keep=lambda rows, say: keep(rows, keep_in, made, say),
        )  # fmt: skip

    batches = [p for p in paper(MODELS) if p.part == "sweep"][:60]
    assert swept([], 1.0, tmp_path / "none") == 1
    assert "nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    assert swept(batches, 60.0, tmp_path / "kept") == 0
    for model in MODELS:
        table, message = read(tmp_path / "kept", made(model))
        assert table is not None, message
        assert {row.variant for row in table.rows} == {"few"}
    (tmp_path / "file").write_text("")
    assert swept(batches, 1.0, tmp_path / "file") == 1
    assert "cannot be written" in capsys.readouterr().out


def test_floors_are_judged_by_the_worst_and_by_the_mean(tmp_path: Path) -> None:
    card = Card()
    batches = [p for p in paper(MODELS) if p.part == "sweep"][:40]
    calls = {model: CardCalls(card) for model in KV_HEADS}
    run(batches, calls, tmp_path, ABOUT, seconds=60.0, hold=0.2, meter=NoMeter(), clock=card.monotonic)
    found = summary(measured(tmp_path))
    assert found["mean over whole"] == pytest.approx(GAIN, abs=1e-3)
    assert found["mean over cut"] == pytest.approx(GAIN / 1.05, abs=1e-3)
    assert found["worst ratio to the best other"] < 1
    assert found["joules saved over whole"] == pytest.approx(1 - 1 / GAIN, abs=1e-3)
    assert found["mean over whole, setting of the nearest other batch"] == pytest.approx(1.3, abs=1e-3)
    assert all(r["us"]["pod all"] == r["us"]["pod rule"] for r in measured(tmp_path) if r["regime"] == "burst")
    lines = floor_lines(found)
    assert any("mean over serial, tiles whole: 1.200" in line and "reached" in line for line in lines)
    assert any("chunks of 128 and 256" in line and "MISSED" in line for line in lines)
    rows = measured(tmp_path)
    slow = next(r for r in rows if r["regime"] == "burst")
    slow["us"]["pod rule"] = 1.5 * slow["us"]["cut"]
    assert summary(rows)["batches slower by more than 1 %"] == 1
    for name in ("figure6.png", "figure10.png", "figure11.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == len(rows) + 1
