"""Daemons that differ in an option, under the same open loads: times to the first token and between tokens.

    python tests/gpu/jobs/slo.py OUT online --serve "--model-preset llama-3-8b …" --way "off=--pod off" --rates 29.2
    python tests/gpu/jobs/slo.py OUT long --serve "…" --num-pages 12000 --way "off=--pod off" --way "auto=--pod auto"

online: one daemon after the other, each with all of the memory; Poisson arrivals at each rate in turn, by `weft load`.
Prompts of 246 +- 547 and answers of 322 +- 244 tokens, log-normal and no longer than `sharegpt.LONGEST`, drawn so that
their means are the distribution's (a random sample of so few had 1.3 times the tokens); no two rates share a prompt.

long: one daemon after the other, each with all of the memory. Prompts and answers of 16.5K tokens together, a P:D of 8
to 24. The first daemon tells what a prompt and a step take, of which follows a capacity: a request is Tp of prefill and
D tokens, each the n-th part of a step of n requests, n as many as the pages hold. Then each daemon gets the same
arrivals at shares of that. Requests with what is left of their answers, as many as will run, stand at the beginning of
each share, so that a steady state is there within seconds; what is judged begins behind them.

Each line of `OUT/rows.txt` (and `rows.jsonl`) is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sharegpt import sharegpt

READY_SECONDS = 180.0
TOKENS = 16_500
"""of a prompt and its answer"""
RATIOS = (8.0, 24.0)
"""tokens of a prompt for one of its answer"""


class Daemon:
    """One `weft serve`, ended with this process's interest in it."""

    def __init__(self, name: str, options: list[str], port: int, out: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = out / f"serve-{name}.txt"
        command = [sys.executable, "-m", "weft.server", "serve", "--host", "127.0.0.1", "--port", str(port), *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it is ready. Raises `SystemExit` with the end of its log."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._get("/ready")
                return
            time.sleep(0.1)
        raise SystemExit(f"{self.name} did not become ready:\n{self._log.read_text(errors='replace')[-3000:]}")

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return str(answer.read().decode())

    def totals(self) -> dict[str, float]:
        """Every counter, sum and count of `/metrics`, those of the daemon's processes included."""
        found = re.findall(r"^(\w+_(?:total|sum|count)(?:\{[^}]*\})?) (\S+)$", self._get("/metrics"), re.M)
        return {name: float(value) for name, value in found}

    def counts(self) -> dict[str, float]:
        """Iterations by the way that attention went, and in all."""
        found = re.findall(
            r"^(weft_(?:attention_iterations|iterations)_total\{[^}]*\}) (\S+)$", self._get("/metrics"), re.M
        )
        return {re.sub(r'.*(?:path|plan)="(\w+)".*', r"\1", name): float(value) for name, value in found}

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Rows:
    """What was found, a line each."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def add(self, line: str, **row: Any) -> None:
        print(line, flush=True)
        with (self.out / "rows.txt").open("a") as text, (self.out / "rows.jsonl").open("a") as lines:
            text.write(line + "\n")
            lines.write(json.dumps(row) + "\n")


def load(daemon: Daemon, name: str, out: Path, *options: str) -> dict[str, Any]:
    """What `weft load` says of one run; its whole report lies in `OUT/load-NAME.json`."""
    file = out / f"load-{name}.json"
    command = [sys.executable, "-m", "weft.server", "load", "--server", daemon.url, "--quiet", "--json", str(file),
               "--extra", '{"temperature": 0}', *options]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    if not file.exists():
        raise SystemExit(f"weft load {name}: {ended.returncode}\n{(ended.stdout + ended.stderr)[-2000:]}")
    return dict(json.loads(file.read_text())["runs"][0])


def paths(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    return {name: int(count - before.get(name, 0)) for name, count in after.items() if count > before.get(name, 0)}


def online(given: argparse.Namespace, rows: Rows) -> None:
    for way in given.way:
        name, options = way.split("=", 1)
        begun = time.monotonic()
        with _daemon(name, given, options, rows.out) as daemon:
            rates = given.rates.split(",")
            _send(daemon, f"warm-{name}", float(rates[0]), 2.0, len(rates), given, rows)
            for seed, rate in enumerate(rates):
                _online(daemon, rate, seed, given, rows)
        rows.add(f"{name}: {time.monotonic() - begun:.0f} s", way=name)


def _send(
    daemon: Daemon, name: str, rate: float, seconds: float, seed: int, given: argparse.Namespace, rows: Rows
) -> dict[str, Any]:  # fmt: skip
    trace = rows.out / f"trace-{name}.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in sharegpt(rate, seconds, seed)))
    warmup = given.warmup if seconds > given.warmup else 0
    run = load(
        daemon, name, rows.out, *shlex.split(given.load), "--trace", str(trace), "--seed", str(seed), "--warmup",
        f"{warmup}s", "--drain", f"{given.drain}s",
    )  # fmt: skip
    trace.unlink()
    return run


def _online(daemon: Daemon, rate: str, seed: int, given: argparse.Namespace, rows: Rows) -> None:
    before, since = daemon.counts(), daemon.totals()
    run = _send(daemon, f"{daemon.name}-{rate}", float(rate), given.seconds, seed, given, rows)
    went, totals = paths(before, daemon.counts()), daemon.totals()
    # What the engine says of it: a step here and a gap at the client differ by what is between them.
    grown = {name: value - since.get(name, 0.0) for name, value in totals.items() if value != since.get(name, 0.0)}
    (rows.out / f"grown-{daemon.name}-{rate}.json").write_text(json.dumps(grown, indent=1))
    times = {name: run["latency"][name] for name in ("ttft", "tpot", "itl")}
    ms = {name: {k: 1e3 * v for k, v in found.items() if isinstance(v, float)} for name, found in times.items()}
    rows.add(
        f"{rate:>5}/s {daemon.name:8} TTFT mean {ms['ttft']['mean']:7.1f} p50 {ms['ttft']['p50']:7.1f} "
        f"p99 {ms['ttft']['p99']:7.1f} | TPOT mean {ms['tpot']['mean']:6.2f} p50 {ms['tpot']['p50']:6.2f} | "
        f"ITL mean {ms['itl']['mean']:6.2f} p50 {ms['itl']['p50']:6.2f} p99 {ms['itl']['p99']:6.1f} ms | "
        f"{run['outcomes']} {went} {run['tokens']['prompt_cached']} tokens of prompts cached",
        rate=float(rate), way=daemon.name, ms=ms, paths=went, outcomes=run["outcomes"],
    )  # fmt: skip


def replay(
    daemon: Daemon, name: str, out: Path, requests: list[tuple[float, int, int]], drain: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Records of requests (arrival, prompt, answer), a row each."""
    trace, record = out / f"trace-{name}.jsonl", out / f"record-{name}.jsonl"
    keys = ("at", "input_tokens", "output_tokens")
    trace.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in sorted(requests)))
    load(daemon, name, out, "--trace", str(trace), "--record", str(record), "--drain", drain,
         "--seed", str(seed))  # fmt: skip
    found = [json.loads(line) for line in record.read_text().splitlines()]
    trace.unlink()
    record.unlink()  # megabytes; what is judged is in the rows
    return found


def stamps(row: dict[str, Any]) -> np.ndarray:
    """When each of a request's tokens came."""
    if row["ttft"] is None or row["start"] is None:
        return np.zeros(0)
    return row["start"] + row["ttft"] + np.concatenate(([0.0], np.cumsum(row["itl"])))


def calibrate(daemon: Daemon, given: argparse.Namespace, rows: Rows) -> tuple[float, float, float]:
    """Seconds of a prompt alone; of a step, without requests and for each."""
    prompt, beside = int(given.tokens * 0.94), given.beside
    replay(daemon, "warm", rows.out, [(0.0, prompt, 4)] * 2, "60s", seed=1)
    came = [stamps(r) for r in replay(daemon, "prompts", rows.out, [(0.0, prompt, 2)] * 8, "60s", seed=2)]
    prompt_s = max(s[0] for s in came if len(s)) / 8

    def step(n: int) -> float:
        came = [
            stamps(r)
            for r in replay(daemon, f"step-{n}", rows.out, [(0.0, prompt, given.probe)] * n, "120s", seed=n + 2)
        ]
        came = [s for s in came if len(s)]
        since, until = max(s[0] for s in came), min(s[-1] for s in came)
        gaps = [
            float(g) for s in came for g, end in zip(np.diff(s), s[1:], strict=True) if since < end - g and end <= until
        ]
        return float(np.median(gaps or [float(g) for s in came for g in np.diff(s)[-4:]]))

    one, many = step(1), step(beside)
    each = max(1e-9, (many - one) / (beside - 1))
    rows.add(
        f"a prompt of {prompt} tokens {prompt_s:.3f} s, a step of 1 request {1e3 * one:.2f} ms, "
        f"of {beside} {1e3 * many:.2f}",
        prompt_s=prompt_s, step_1_s=one, step_s=many, beside=beside,
    )  # fmt: skip
    return prompt_s, one - each, each


def arrivals(
    capacity: float, costs: tuple[float, float, float], given: argparse.Namespace
) -> tuple[list[tuple[float, int, int]], list[tuple[float, float, float]]]:
    """Requests, and (share, begin, end) of what is judged."""
    prompt_s, step_s, each_s = costs
    rng = np.random.default_rng(3)
    requests: list[tuple[float, int, int]] = []
    windows, now, running = [], 0.0, 0

    def lengths() -> tuple[int, int]:
        answer = int(given.tokens / (1 + rng.uniform(*RATIOS)))
        return given.tokens - answer, answer

    mean = float(np.mean([lengths()[1] for _ in range(500)]))
    for share in map(float, given.shares.split(",")):
        rate = share * capacity
        left = max(0.05, 1 - rate * prompt_s)  # of the time, for steps
        busy = min(0.9, rate * mean * each_s / left)
        will_run = min(given.most, round(rate * mean * step_s / left / (1 - busy)))
        for k in range(max(0, will_run - running)):
            prompt, answer = lengths()
            requests.append((now + k * prompt_s, prompt, max(2, int(answer * rng.uniform()))))
        begin = now + max(0, will_run - running) * prompt_s * 1.3 + given.settle
        end, at = begin + given.seconds, now
        while (at := at + rng.exponential(1 / rate)) < end:
            requests.append((at, *lengths()))
        windows.append((share, begin, end))
        now, running = end, will_run
    return requests, windows


def judge(records: list[dict[str, Any]], begin: float, end: float) -> dict[str, Any]:
    """Of what came between the two times; a first token that had not come by then counts as having waited so long."""
    gaps, ttft, waiting, tokens, prompts = list[float](), list[float](), 0, 0, 0
    for row in records:
        came = stamps(row)
        tokens += int(((came >= begin) & (came < end)).sum())
        if len(came):
            prompts += row["input_tokens"] if begin <= came[0] < end else 0
            gaps += [float(g) for g, at in zip(np.diff(came), came[1:], strict=True) if begin <= at < end]
        if begin <= row["at"] < end:
            waits = not len(came) or bool(came[0] > end)
            waiting += waits
            ttft.append(end - row["at"] if waits else float(came[0] - row["at"]))
    quantiles = {f"tbt_p{q}_ms": 1e3 * float(np.percentile(gaps, q)) for q in (50, 90, 99)} if gaps else {}
    return {
        "requests": len(ttft), "still_waiting": waiting, "ttft_mean_s": float(np.mean(ttft or [np.nan])),
        "ttft_p50_s": float(np.median(ttft or [np.nan])), "ttft_p99_s": float(np.percentile(ttft or [np.nan], 99)),
        **quantiles, "gaps_over_200_ms": float(np.mean(np.array(gaps or [0.0]) > 0.2)),
        "output_tokens_per_second": tokens / (end - begin), "prompt_tokens_per_second": prompts / (end - begin),
    }  # fmt: skip


def long(given: argparse.Namespace, rows: Rows) -> None:
    plan: tuple[list[tuple[float, int, int]], list[tuple[float, float, float]]] | None = None
    for way in given.way:
        name, options = way.split("=", 1)
        begun = time.monotonic()
        with _daemon(name, given, options, rows.out) as daemon:
            if plan is None:
                costs = calibrate(daemon, given, rows)
                mean = given.tokens / (1 + float(np.mean(RATIOS)))
                given.most = int(given.num_pages * given.page_size / given.tokens)
                capacity = 1 / (costs[0] + mean * (costs[1] / given.most + costs[2]))
                rows.add(
                    f"capacity {capacity:.3f} requests/s, {given.most} at once", capacity=capacity, most=given.most
                )
                plan = arrivals(capacity, costs, given)
            requests, windows = plan
            before = daemon.counts()
            records = replay(daemon, name, rows.out, requests, "1s")
            went = paths(before, daemon.counts())
        for share, begin, end in windows:
            found = judge(records, begin, end)
            rows.add(
                f"{share:.2f} of capacity {name:6} TTFT mean {found['ttft_mean_s']:6.2f} "
                f"p50 {found['ttft_p50_s']:6.2f} p99 {found['ttft_p99_s']:6.2f} s "
                f"({found['requests']}, {found['still_waiting']} waiting) | TBT p50 {found.get('tbt_p50_ms', 0):6.1f} "
                f"p99 {found.get('tbt_p99_ms', 0):6.1f} ms, over 200 ms {100 * found['gaps_over_200_ms']:.2f} % | "
                f"{found['output_tokens_per_second']:.0f} output, "
                f"{found['prompt_tokens_per_second']:.0f} prompt tokens/s",
                way=name, share=share, **found, paths=went,
            )  # fmt: skip
        rows.add(f"{name}: {time.monotonic() - begun:.0f} s, iterations {went}", way=name, paths=went)


@contextlib.contextmanager
def _daemon(name: str, given: argparse.Namespace, options: str, out: Path) -> Iterator[Daemon]:
    pages = (
        [] if given.num_pages is None else ["--num-pages", str(given.num_pages), "--page-size", str(given.page_size)]
    )
    daemon = Daemon(name, [*shlex.split(given.serve), *pages, *shlex.split(options)], given.port, out)
    try:
        daemon.wait()
        yield daemon
    finally:
        daemon.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("mode", choices=("online", "long"))
    parser.add_argument("--serve", required=True, help="options of every daemon")
    parser.add_argument("--way", action="append", required=True, metavar="NAME=OPTIONS", help="of one daemon")
    parser.add_argument("--port", type=int, default=18200, help="of the first")
    parser.add_argument("--seconds", type=float, default=22, help="of arrivals at a rate; long: that are judged")
    parser.add_argument("--rates", default="29.2,38.6,14.4", help="requests a second")
    parser.add_argument("--load", default="--processes 2", help="options of weft load")
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument("--drain", type=float, default=12)
    parser.add_argument("--num-pages", type=int, help="of each daemon; long: 12,000 unless told otherwise")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--shares", default="0.7,0.95", help="of the capacity")
    parser.add_argument("--settle", type=float, default=6, help="seconds before what is judged")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--beside", type=int, default=16, help="requests whose step is timed")
    parser.add_argument("--probe", type=int, default=60, help="tokens of their answers")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.mode == "long":
        given.num_pages = given.num_pages or 12000
    (online if given.mode == "online" else long)(given, Rows(given.out))


if __name__ == "__main__":
    main()
