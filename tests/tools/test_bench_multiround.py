"""`weft bench multiround` on the demo model: which figures it prints, and that they add up. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.server.daemon.cli import main

SMALL = [
    *("bench", "multiround", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1"),
    *("--page-size", "16", "--num-pages", "24"),
    *("--rounds", "2", "--turn-tokens", "30", "--output-tokens", "6", "--restore-tokens", "60"),
]


def test_the_figures_of_both_runs_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "figures.json", ["--ssd-kv-path", str(tmp_path / "kv"), "--ssd-kv-gib", "0.05"]
    assert main([*SMALL, "--host-kv-gib", "0.02", *store, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    # 23 pages of 16 tokens; conversations that end with 72.
    assert figures["workload"] == "15 conversations of 2 rounds, 30 new tokens and 6 out"
    assert figures["last_rounds_exceed_the_pool"] == pytest.approx(15 * 72 / (23 * 16))
    for run in ("tiers", "plain"):
        assert figures[f"{run}_prompt_tokens"] == 15 * (30 + 66)
        total = figures[f"{run}_total_tokens_per_second"] * figures[f"{run}_seconds"]
        assert total == pytest.approx(15 * (30 + 66 + 2 * 6))
    hits = figures["tiers_cached_share_of_prompt_tokens"] * figures["tiers_prompt_tokens"]
    assert hits == pytest.approx(sum(figures[f"tiers_{tier}_hit_tokens"] for tier in ("gpu", "host", "ssd")))
    assert figures["tiers_host_hit_tokens"] > 0
    assert figures["tiers_computed_prompt_tokens"] < figures["plain_computed_prompt_tokens"]
    assert figures["ratio_to_plain"] == pytest.approx(figures["plain_seconds"] / figures["tiers_seconds"])
    assert {"restore_tokens_from_host", "restore_tokens_from_ssd"} <= figures.keys()
    assert "ratio to plain" in capsys.readouterr().out


def test_without_a_tier_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 2
    error = capsys.readouterr().err
    assert "--host-kv-gib" in error
    assert error.count("\n") == 1
