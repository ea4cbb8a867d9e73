"""`weft load` as a user runs it: processes, reports, exit status, and one-line errors."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from sse_server import serving

from weft.loadgen import preflight
from weft.loadgen.client import Target
from weft.loadgen.connection import Address
from weft.loadgen.traces import read_trace
from weft.server.daemon.cli import main

pytestmark = pytest.mark.slow


async def load(*arguments: str) -> int:
    """Run the command while the server runs in this event loop."""
    return await asyncio.to_thread(_load, arguments)


def _load(arguments: tuple[str, ...]) -> int:
    try:
        return main(["load", "--quiet", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    # The command runs in a thread here, and only the main thread may set signal handlers.
    monkeypatch.setattr("weft.loadgen.processes.signal.signal", lambda *_: None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


METRICS = """\
# TYPE weft_time_to_first_token_seconds histogram
weft_time_to_first_token_seconds_bucket{{le="+Inf"}} {n}
weft_time_to_first_token_seconds_sum {sum}
weft_time_to_first_token_seconds_count {n}
# TYPE weft_generation_tokens counter
weft_generation_tokens_total {tokens}
"""


async def test_a_run_writes_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "html", "record")}
    flags = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    async with serving(ttft=0.01, itl=0.002, statuses=(200, 503)) as stub:
        stub.metrics = METRICS.format(n=3, sum=1.0, tokens=7)
        status = await load(
            "--server", f"<b>={stub.url}", "--rate", "40", "--requests", "30", "--input", "20", "--output", "5",
            "--processes", "2", "--slo", "ttft:p50:500ms", *flags,
        )  # fmt: skip
    assert status == 0
    shown = capsys.readouterr().out
    assert "29 of 30 requests answered (1 overloaded)" in shown
    assert "TTFT" in shown
    report = json.loads(files["json"].read_text())
    (run,) = report["runs"]
    assert run["outcomes"] == {"ok": 29, "overloaded": 1}
    assert run["slo"]["attainment"] == pytest.approx(29 / 30)
    assert run["tokens"]["output_received"] == run["tokens"]["output_asked"] == 29 * 5
    assert run["generator"]["processes"] == 2
    assert run["server_view"]["totals"]["generation_tokens"] == 0
    assert report["formulas"]["ttft"]
    shares = run["stalled_requests"]  # not zero on a busy machine
    assert 0 <= shares["over_500ms"] <= shares["over_200ms"] <= 1
    assert run["latency"]["stall"]["n"] == 29
    stalls = f"{shares['over_200ms']:.1%} over 200 ms, {shares['over_500ms']:.1%} over 500 ms"
    assert f"requests with a stall: {stalls}" in shown
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(int(row["index"]) for row in rows) == list(range(30))
    assert {row["outcome"] for row in rows} == {"ok", "overloaded"}
    assert sum(bool(row["stall"]) for row in rows) == 29
    trace = read_trace(files["record"])
    assert [row.at for row in trace.rows] == sorted(float(f"{row.at}") for row in trace.rows)
    assert {(row.input_tokens, row.output_tokens) for row in trace.rows} == {(20, 5)}
    page = files["html"].read_text()
    assert "&lt;b&gt;" in page
    assert "Requests with a stall over 200 ms" in page
    assert "<b>" not in page
    # Self-contained: the page fetches nothing.
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)|@import|url\((?!#|&quot;#|data:)""", page)
    assert page.count("<svg") == 4


async def test_a_sweep_compares_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    async with serving(service=0.002) as fast, serving(service=1.0) as slow:
        status = await load(
            "sweep", "--server", f"fast={fast.url}", "--server", f"slow={slow.url}", "--rate", "5", "--growth", "8",
            "--duration", "1", "--max-runs", "2", "--slo", "e2e:p90:1500ms", "--input", "4", "--output", "1",
            "--json", str(out),
        )  # fmt: skip
    assert status == 1
    fast_sweep, slow_sweep = json.loads(out.read_text())["sweeps"]
    assert fast_sweep["highest_rate_met"] == 40.0
    assert slow_sweep["highest_rate_met"] is None
    shown = capsys.readouterr().out
    assert "fast: highest rate within the objectives 40 requests/s" in shown
    assert "slow: no rate met" in shown


async def test_a_recorded_run_can_be_replayed(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    async with serving() as stub:
        assert await load("--server", stub.url, "--rate", "50", "--requests", "8", "--record", str(record)) == 0
        assert await load("--server", stub.url, "--trace", str(record), "--rate", "80") == 0
    first, second = stub.requests[1:9], stub.requests[10:]
    assert len(second) == 8
    assert [len(body["prompt"]) for body in second] == [len(body["prompt"]) for body in first]


async def test_lengths_that_do_not_fit_are_cut_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(context=100) as stub:
        await load("--server", stub.url, "--rate", "50", "--requests", "4", "--input", "200", "--output", "10")
    assert "4 of 4 requests were longer than the server's context of 100 tokens" in capsys.readouterr().out
    assert all(len(body["prompt"]) == 90 for body in stub.requests[1:])


async def test_words_are_first_counted_by_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(words_per_token=1.5, template_tokens=7) as stub:
        await load("--server", stub.url, "--endpoint", "chat", "--rate", "50", "--requests", "4", "--input", "307")
    assert "1228 in, 512 out; counted by the server: 1228 in" in capsys.readouterr().out


async def test_a_server_that_refuses_extensions_is_measured_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(refuses_extensions=True, tokens=3) as stub:
        assert await load("--server", stub.url, "--rate", "50", "--requests", "4", "--output", "20") == 0
    shown = capsys.readouterr().out
    assert "the server rejects ignore_eos" in shown
    assert "Answers had 12 of 80 requested tokens" in shown


async def test_the_given_key_model_header_and_fields_are_sent() -> None:
    async with serving(api_key="k", models=("a", "b")) as stub:
        status = await load(
            "--server", f"{stub.url}/v1/", "--api-key", "k", "--model", "b", "--header", "X-A: 1", "--requests", "1",
            "--extra", '{"temperature": 0.5}', "--eos",
        )  # fmt: skip
    assert status == 0
    body = stub.requests[-1]
    assert (body["model"], body["temperature"]) == ("b", 0.5)
    assert "ignore_eos" not in body
    assert stub.headers[-1]["x-a"] == "1"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


async def test_no_server_a_missing_key_and_an_unknown_model_are_one_line_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving(api_key="k") as stub:
        assert await load("--server", stub.url) == 2
        assert "--api-key" in one_line(capsys)
        assert await load("--server", stub.url, "--api-key", "k", "--model", "gpt") == 2
        assert "served: stub" in one_line(capsys)
    assert await load("--server", stub.url) == 2
    assert "no server answers" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "fast"], "--rate"),
        (["--rate", "inf"], "--rate: inf is not a finite number"),
        (["--duration", "0s"], "--duration"),
        (["--timeout", "0s"], "--timeout must be more than 0"),
        (["--users", "3", "--rate", "2"], "--rate"),
        (["--users", "3", "--rate-end", "2"], "--rate-end"),
        (["--arrival", "ramp"], "--rate-end"),
        (["--arrival", "poisson", "--burstiness", "2"], "--burstiness"),
        (["--preset", "lmsys", "--input", "3"], "--input"),
        (["--preset", "lmsys", "--output", "3"], "--output"),
        (["--context", "40"], "--turns"),
        (["--endpoint", "chat", "--prompts", "ids"], "--prompts"),
        (["--token-ids", "5"], "--token-ids"),
        (["--token-ids", "5:5"], "--token-ids"),
        (["--shared-prefix", "2"], "--shared-prefix"),
        (["--extra", "[1]"], "--extra"),
        (["--header", "x"], "--header"),
        (["--server", "ftp://x"], "--server"),
        (["--server", "http://x:y"], "--server"),
        (["--server", "a=http://x", "--server", "a=http://y"], "--server"),
        (["--slo", "ttft"], "--slo"),
        (["--trace", "/nowhere"], "--trace"),
        (["--speed", "2"], "--speed"),
        (["--processes", "0"], "--processes"),
        (["--warmup", "2m", "--duration", "1m"], "--warmup"),
        (["--json", "/nowhere/x.json"], "--json"),
        (["sweep"], "--slo"),
        (["sweep", "--slo", "nanoflow", "--users", "2"], "closed"),
        (["--ratee", "2"], "did you mean --rate"),
        (["http://127.0.0.1:8000"], "--server"),
    ],
)
def test_bad_input_is_a_one_line_error_that_names_the_flag(arguments: list[str], named: str, capsys: Any) -> None:
    assert _load(tuple(arguments)) == 2
    assert named in one_line(capsys)


async def test_a_missed_objective_is_status_1() -> None:
    async with serving(ttft=0.05) as stub:
        assert await load("--server", stub.url, "--rate", "50", "--requests", "3", "--slo", "ttft:mean:1ms") == 1


async def test_a_run_in_which_everything_failed_is_reported_as_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    html, out = tmp_path / "x.html", tmp_path / "x.json"
    async with serving(statuses=(200, *[500] * 9)) as stub:
        status = await load(
            "--server", stub.url, "--rate", "50", "--requests", "4", "--slo", "nanoflow", "--html", str(html),
            "--json", str(out),
        )  # fmt: skip
    assert status == 1
    assert "0 of 4 requests answered (4 refused)" in capsys.readouterr().out
    run = json.loads(out.read_text())["runs"][0]
    assert (run["slo"]["met"], run["slo"]["attainment"], run["latency"]["ttft"]["mean"]) == (False, 0.0, None)
    assert run["errors"] == {"Status 500.": 4}
    assert run["stalled_requests"] == {"over_200ms": None, "over_500ms": None}
    assert "answered 0 of 4" in html.read_text()


async def test_an_interrupt_ends_a_run_early_and_reports_it() -> None:
    async with serving() as stub:
        command = ("load", "--server", stub.url, "--rate", "50", "--duration", "60", "--processes", "2")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "weft.server.daemon.cli", *command, stdout=asyncio.subprocess.PIPE
        )
        while len(stub.requests) < 20:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode in (0, 1)  # 1 if this machine is so busy that nothing was answered yet
    assert b"The run was interrupted." in shown
    sent = re.search(rb"\d+ of (\d+) requests answered", shown)
    assert sent is not None
    assert 15 <= int(sent[1]) < 3000


async def test_a_terminal_interrupt_while_processes_start_prints_no_traceback() -> None:
    """The interrupt reaches all of them, including those that still import."""
    async with serving() as stub:
        command = ("load", "--server", stub.url, "--rate", "50", "--duration", "60", "--processes", "2")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "weft.server", *command, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        while not any("spawn_main" in Path(f"/proc/{pid}/cmdline").read_text() for pid in children(process.pid)):
            await asyncio.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        shown, complaints = await asyncio.wait_for(process.communicate(), 240)
    assert (process.returncode, complaints) == (1, b"")  # nothing was answered
    assert b"The run was interrupted." in shown


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_rows_of_inferencex_need_a_fixed_concurrency_and_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    async with serving(ttft=0.01, itl=0.002) as stub:
        flags = ("--server", stub.url, "--format", "inferencex", "--requests", "4", "--input", "20", "--output", "5")
        assert await load(*flags, "--json", str(out), "--users", "2", "--row", "hw=h200", "--row", "tp=2") == 0
        (row,) = json.loads(out.read_text())
        assert (row["hw"], row["tp"], row["conc"], row["isl"], row["osl"]) == ("h200", 2, 2, 20, 5)
        capsys.readouterr()
        for wrong in (("--json", str(out)), ("--users", "2"), ("--json", str(out), "--users", "2", "--row", "hw")):
            assert await load(*flags, *wrong) == 2
            assert capsys.readouterr().err.count("\n") == 1


async def test_a_server_that_accepts_connections_and_sends_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert await load("--server", url, "--requests", "1") == 2
        assert f"no server answers at {url} (no answer within 0.1 s)" in capsys.readouterr().err
        assert await preflight.snapshot(Target("mute", Address.parse(url), "m")) is None  # this does not lose a run
