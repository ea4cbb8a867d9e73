"""`weft bench server` runs from end to end and reports what it did; its figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.server.cli import main


@pytest.mark.parametrize("more", [["--endpoint", "chat", "--api-workers", "2"], ["--tokenize", "100"]], ids=str)
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--streams", "10", "--rate", "50", "--seconds", "0.5", "--json", str(file), *more]
    assert main(["bench", "server", *arguments]) == 0
    figures = json.loads(file.read_text())
    assert 100 < figures["tokens"] < 400
    assert figures["api_us_per_token"] > 0
    assert (figures["tokenized"] > 0) == ("--tokenize" in more)
    assert f"{figures['api_us_per_token']:.1f} us" in capsys.readouterr().out


def test_what_cannot_be_measured_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "server", "--streams", "0"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
