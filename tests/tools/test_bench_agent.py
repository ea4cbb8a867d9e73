"""`weft bench agent` on the demo model: the meaning of its figures. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.engine.memory.loads import LoadSpeeds
from weft.server.daemon.cli import main

SMALL = [
    *("bench", "agent", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--page-size", "8"),
    *("--context-tokens", "500", "--turns", "5", "--turn-tokens", "20", "--output-tokens", "6", "--restores", "2"),
]


def test_cached_prefixes_are_found_in_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a busy machine may find that computing is quicker
    monkeypatch.setattr(LoadSpeeds, "worthwhile", lambda _, entries, *_busy: len(entries))
    file, store = tmp_path / "figures.json", ["--ssd-kv-path", str(tmp_path / "kv"), "--ssd-kv-gib", "0.05"]
    assert main([*SMALL, "--host-kv-gib", "0.02", *store, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    for share in ("", "host_", "ssd_"):
        # all but the page that is not full, and the last token, which was never computed
        assert 0.98 <= figures[f"{share}found_share_of_tokens_seen"] < 1
        # of 500 tokens in pages of 8, at least
        assert not share or figures[f"{share}pages_fetched_ahead"] >= 62
    assert figures["ttft_ms_second_turn"] > 0
    assert {"host_ttft_ms_median", "ssd_ttft_ms_median", "host_gb_per_second"} <= figures.keys()


@pytest.mark.parametrize(
    ("options", "word"), [(["--turns", "1"], "--turns"), (["--max-model-len", "400"], "--max-model-len")]
)
def test_an_impossible_setup_is_a_one_line_error(
    options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
