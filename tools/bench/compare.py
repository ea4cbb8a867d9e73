"""`weft bench compare`: the same load on several OpenAI-compatible servers in turn, as a table and a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.autosearch.options import OneLineParser

POLL_SECONDS = 0.2
END_SECONDS = 30.0  # Seconds between SIGTERM and SIGKILL.

FIGURES = {
    "ttft_mean": ("TTFT mean, ms", lambda run: 1e3 * run["latency"]["ttft"]["mean"]),
    "ttft_p99": ("TTFT p99, ms", lambda run: 1e3 * run["latency"]["ttft"]["p99"]),
    "tpot_mean": ("TPOT mean, ms", lambda run: 1e3 * run["latency"]["tpot"]["mean"]),
    "itl_p99": ("ITL p99, ms", lambda run: 1e3 * run["latency"]["itl"]["p99"]),
    "output": ("output tokens/s", lambda run: run["throughput"]["output_tokens_per_second"]),
    "failed": ("failed", lambda run: sum(n for name, n in run["outcomes"].items() if name != "ok")),
}
"""Columns of the table: title, and value from a run of `weft load --json`."""


class CompareError(Exception):
    """A server cannot be started or measured. The message is one line."""


@dataclass
class Server:
    """One of the servers: a command with `{port}`, and what was measured."""

    name: str
    command: list[str]
    starts: list[float] = field(default_factory=list)  # Seconds from the start of the process to the first answer.
    runs: dict[float, list[dict[str, Any]]] = field(default_factory=dict)  # Runs of `weft load` by rate.

    @classmethod
    def parse(cls, text: str) -> Server:
        """Read NAME=COMMAND. Raises `argparse.ArgumentTypeError`."""
        name, _, command = text.partition("=")
        words = shlex.split(command)
        if not name or not words or not any("{port}" in word for word in words):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
        return cls(name, words)

    def median(self, rate: float, figure: str) -> float:
        return statistics.median(FIGURES[figure][1](run) for run in self.runs[rate])


def main(argv: Sequence[str] | None = None) -> int:
    """Start OpenAI-compatible servers one after the other, put each under the same Poisson loads, and write a table
    (compare.md), a picture (compare.svg) and all runs (compare.json). Further options go to `weft load`."""
    parser = OneLineParser("weft bench compare", main.__doc__)
    add = parser.add_argument
    add(
        "servers", metavar="NAME=COMMAND", nargs="+", type=Server.parse, help="a server; {port} is replaced by its port"
    )
    add("--rates", metavar="R,R,…", type=_rates, default=(1.0, 2.0, 4.0), help="requests per second [1,2,4]")
    add("--turns", metavar="N", type=int, default=2, help="starts of each server, in alternating order [2]")
    add("--start-timeout", metavar="S", type=float, default=900.0, help="seconds to wait for a server [900]")
    add("--out", metavar="FOLDER", type=Path, default=Path("build/compare"), help="where to write [build/compare]")
    arguments, load_options = parser.parse_known_args(argv)
    servers: list[Server] = arguments.servers
    if len({server.name for server in servers}) < len(servers):
        parser.error("two servers have the same name")
    if arguments.turns < 1:
        parser.error("--turns must be at least 1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        for turn in range(arguments.turns):
            for server in servers if turn % 2 == 0 else servers[::-1]:
                _measure(server, arguments, load_options, turn)
    except CompareError as error:
        print(f"weft bench compare: {error}", file=sys.stderr)
        return 1
    finally:
        _write(arguments.out, servers, arguments, load_options)  # An interrupted comparison keeps its runs.
    print((arguments.out / "compare.md").read_text(encoding="utf-8"))
    return 0


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive rates such as 1,2,4")
    return rates


def _measure(server: Server, arguments: argparse.Namespace, load_options: list[str], turn: int) -> None:
    log = arguments.out / f"{server.name}-{turn + 1}.log"
    with _serving(server, log, arguments.start_timeout) as url:
        for rate in arguments.rates:
            print(f"turn {turn + 1}: {server.name} at {rate:g} requests/s", file=sys.stderr, flush=True)
            out = arguments.out / "run.json"
            words = ["load", "--server", f"{server.name}={url}", "--rate", f"{rate:g}", "--json", str(out), "--quiet"]
            command = [sys.executable, "-P", "-m", "weft.server.daemon.cli", *words, *load_options]
            out.unlink(missing_ok=True)
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if not out.exists():
                raise CompareError(f"weft load failed: {_last_line(ended.stderr)}")
            (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
            out.unlink()
            if not run["outcomes"].get("ok"):
                raise CompareError(f"{server.name} answered no request at {rate:g} requests/s: {run['errors']}")
            server.runs.setdefault(rate, []).append(run)


@contextmanager
def _serving(server: Server, log: Path, timeout: float) -> Iterator[str]:
    """Run a server and yield its URL once it lists a model. Its output goes to `log`. Raises `CompareError`."""
    port = _free_port()
    command = [word.replace("{port}", str(port)) for word in server.command]
    begun = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise CompareError(f"{server.name}: cannot run {command[0]}: {error.strerror}") from None
    try:
        url = f"http://127.0.0.1:{port}"
        while not _lists_models(url):
            if process.poll() is not None:
                last = _last_line(log.read_text(encoding="utf-8", errors="replace"))
                raise CompareError(f"{server.name} ended with status {process.returncode}: {last}")
            if time.monotonic() - begun > timeout:
                raise CompareError(f"{server.name} was not ready after {timeout:g} s; its output is in {log}")
            time.sleep(POLL_SECONDS)
        server.starts.append(time.monotonic() - begun)
        yield url
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and everything that it started."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _lists_models(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer).get("data"))
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _write(folder: Path, servers: list[Server], arguments: argparse.Namespace, load_options: list[str]) -> None:
    measured = [server for server in servers if all(rate in server.runs for rate in arguments.rates)]
    if not measured:
        return
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load": shlex.join(load_options),
        "turns": arguments.turns,
        "commands": {server.name: shlex.join(server.command) for server in servers},
    }
    data = {**about, "servers": {s.name: {"starts": s.starts, "runs": s.runs} for s in measured}}
    (folder / "compare.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (folder / "compare.md").write_text(table(measured, arguments.rates, about), encoding="utf-8")
    (folder / "compare.svg").write_text(picture(measured, arguments.rates), encoding="utf-8")


def table(servers: Sequence[Server], rates: Sequence[float], about: dict[str, Any]) -> str:
    """Return a Markdown table: one row per rate and server, the median over turns."""
    titles = ["requests/s", "server", *(title for title, _ in FIGURES.values())]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for rate in rates:
        for server in servers:
            values = [f"{server.median(rate, figure):.4g}" for figure in FIGURES]
            lines.append("| " + " | ".join([f"{rate:g}", server.name, *values]) + " |")
    starts = (f"{server.name} {statistics.median(server.starts):.1f} s" for server in servers)
    lines += ["", f"Start to first answer: {', '.join(starts)}.", ""]
    lines += [f"- {name}: `{command}`" for name, command in about["commands"].items()]
    lines += [
        f"- load: `weft load {about['load']}`, median of {about['turns']} turns",
        f"- {about['machine']}, {about['date']}",
    ]
    return "\n".join(lines) + "\n"


def picture(servers: Sequence[Server], rates: Sequence[float]) -> str:
    """Return SVG: one panel per figure, its median by rate, one line per server."""
    from weft.loadgen.plots import COLOURS, svg_figure, svg_text

    shown = [figure for figure in FIGURES if figure != "failed"]
    figure, axes = svg_figure(len(shown))
    for axis, name in zip(axes, shown, strict=True):
        for colour, server in zip(COLOURS, servers, strict=False):
            axis.plot(rates, [server.median(rate, name) for rate in rates], "o-", color=colour, label=server.name)
        axis.set(xlabel="offered requests per second", title=FIGURES[name][0], ylim=(0, None))
    if servers:
        axes[0].legend(frameon=False)
    return svg_text(figure, "Servers compared")
