"""`weft fleet`: from flags to tables, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleets import profile

from weft.deploy.fleet.search import fewest
from weft.server.daemon.cli import main

LOAD = ("--input", "30", "--output", "8", "--duration", "2s", "--quiet")


@pytest.fixture
def made(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    profile().save(path)
    return str(path)


def test_every_combination_is_simulated_and_drawn(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    code = main([
        "fleet", "--profile", made, "--engines", "1,3", "--rates", "5,150", "--max-num-seqs", "2,8", *LOAD,
        "--slo", "ttft:p99:100ms", "--json", str(out), "--png", str(png),
    ])  # fmt: skip
    result = json.loads(out.read_text())
    keys = [(p["rate"], p["engines"], p["max_num_seqs"]) for p in result["points"]]
    assert keys == [(r, n, s) for r in (5, 150) for s in (2, 8) for n in (1, 3)]
    assert code == 0
    assert [(b["rate"], b["engines"]) for b in result["best"]] == [(5, 1), (150, 3)]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "ttft:p99:100ms at 150/s: 3 engines, --max-num-seqs 8" in capsys.readouterr().out


def test_the_fewest_engines_are_found(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    requested = ["fleet", "--profile", made, "--rate", "200", *LOAD, "--slo", "ttft:p99:100ms"]
    assert main(requested) == 0
    assert "3 engines" in capsys.readouterr().out
    assert main([*requested, "--max-engines", "2"]) == 1
    assert "missed, with up to 2 engines" in capsys.readouterr().out


@pytest.mark.parametrize(("least", "most", "tried"), [
    (1, 64, [1]), (5, 64, [1, 2, 4, 8, 6, 5]), (6, 6, [1, 2, 4, 6, 5]), (9, 6, [1, 2, 4, 6]),
])  # fmt: skip
def test_the_search_doubles_then_halves(least: int, most: int, tried: list[int]) -> None:
    from types import SimpleNamespace

    points = list(fewest(lambda n: SimpleNamespace(engines=n, met=n >= least), most))  # type: ignore[arg-type, return-value]
    assert [p.engines for p in points] == tried


def test_a_trace_with_prefixes_is_replayed(made: str, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 400 * i, "input_length": 600, "output_length": 4, "hash_ids": [7, i]} for i in range(6)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fleet", "--profile", made, "--trace", str(trace), "--speed", "2", "--json", str(out), "--quiet"]) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert point["requests"] == 6
    assert point["prefix_hit_share"] == pytest.approx(5 / 6 * 512 / 600, abs=0.01)


def test_a_failure_costs_answers(made: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--engines", "2", "--rate", "20", "--fail", "1:1s:500ms", "--json", str(out)]
    assert main(["fleet", "--profile", made, *flags, *LOAD]) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert 1 <= point["outcomes"]["broken"] <= 8


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--profile", "none"), "shipped profiles:"),
        (("--engines", "x"), "--engines"),
        (("--rates", "1,2", "--rate", "3"), "--rates does not work with"),
        (("--users", "3", "--slo", "nanoflow"), "a closed loop"),
        (("--fail", "0:1s:1s", "--slo", "nanoflow"), "--fail: set --engines"),
        (("--fail", "3:1s:1s", "--engines", "2"), "--fail: set --engines"),
        (("--fail", "0:1s", "--engines", "2"), "is not ENGINE:AT:FOR"),
        (("--fail", "0:1s:9s", "--fail", "0:5s:1s", "--engines", "2"), "is still down"),
        (("--slo", "speed:p99:1s"), "--slo"),
        (("--itl-slo", "ttft:p99:1s"), "--itl-slo: ttft is not"),
        (("--prompts", "words"), "--prompts words"),
        (("--max-failures", "2"), "must be between 0 and 1"),
        (("--warmup", "9s", "--duration", "2s", "--slo", "nanoflow"), "shorten --warmup"),
        (("--warmup", "9s", "--users", "2", "--duration", "2s"), "shorten --warmup"),
    ],
)
def test_bad_input_is_a_one_line_error(flags: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--quiet", *flags]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("weft fleet: ")
    assert why in message
    assert "\n" not in message


def test_arrivals_that_end_before_a_steady_load_are_reported(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fleet", "--profile", made, "--rate", "3", "--duration", "1s", "--output", "60", "--quiet"])
    assert "use a longer --duration" in capsys.readouterr().out
    main(["fleet", "--profile", made, "--rate", "3", "--duration", "20s", "--output", "5", "--quiet"])
    assert "use a longer --duration" not in capsys.readouterr().out
