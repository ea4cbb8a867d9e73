"""`weft bench server` runs from end to end and reports what it did; its figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.server.daemon.cli import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "more",
    [
        ["--endpoint", "chat", "--api-workers", "2", "--scrapes", "20"],
        ["--endpoint", "messages"],
        ["--tokenize", "100", "--fields", '{"logprobs": 2}'],
    ],
    ids=str,
)
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--streams", "10", "--rate", "50", "--seconds", "1.5", "--json", str(file), *more]
    assert main(["bench", "server", *arguments]) == 0
    figures = json.loads(file.read_text())
    nominal = 10 * 50 * figures["seconds"]  # the machine may pause, or the engine catch up after a pause
    assert nominal / 10 < figures["tokens"] < nominal * 10
    assert figures["api_us_per_token"] > 0
    assert figures["fields"] == ({"logprobs": 2} if "--fields" in more else {})
    assert (figures["tokenized"] > 0) == ("--tokenize" in more)
    assert figures.get("scrapes", 0) == (30 if "--scrapes" in more else 0)
    assert f"{figures['api_us_per_token']:.1f} us" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--streams", "0"], ["--fields", "{"], ["--fields", "[1]"]], ids=str)
def test_an_impossible_measurement_is_a_one_line_error(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["bench", "server", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
