"""Measures TTFT and inter-token times of daemons that differ in one option, under the same open loads.

    python benchmarks/jobs/latency.py OUT online --serve "--model-preset llama-3-8b" --way "off=--pod off" --rates 29
    python benchmarks/jobs/latency.py OUT long --serve "…" --num-pages 90 --way "off=--pod off" --way "auto=--pod auto"

The daemons run in sequence, each with all of the memory. Each line of `OUT/rows.txt` (and `rows.jsonl`) is written as
soon as it is measured.

online: Poisson arrivals at each rate by `weft load`. Prompts of 246 +- 547 and answers of 322 +- 244 tokens, log-normal
and at most `sharegpt.LONGEST`, drawn as evenly spaced quantiles because a small random sample has a different mean.
No two rates share a prompt.

long: prompt and answer of 16.5K tokens together, with a ratio of 8 to 24. The first daemon is timed to find a capacity
(`long_prompts_load.py`). Each daemon then gets the same arrivals at shares of that capacity. It begins with as many
requests as are expected to decode, so the steady state starts once their prompts are computed; only later times count.
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
from free_port import free_port
from long_prompts_load import Costs, Share, answers, arrivals
from sharegpt import sharegpt

READY_SECONDS = 180.0
TOKENS = 16_500
"""Tokens of a prompt and its answer together."""


class Daemon:
    """A running `weft serve` process."""

    def __init__(self, name: str, options: list[str], port: int, out: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = out / f"serve-{name}.txt"
        command = [sys.executable, "-m", "weft.server", "serve", "--host", "127.0.0.1", "--port", str(port), *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Waits until the daemon is ready. Raises `SystemExit` with the end of its log if it fails."""
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
        """Every counter, sum and count of `/metrics`."""
        found = re.findall(r"^(\w+_(?:total|sum|count)(?:\{[^}]*\})?) (\S+)$", self._get("/metrics"), re.M)
        return {name: float(value) for name, value in found}

    def counts(self) -> dict[str, float]:
        """Iterations by attention path and by plan."""
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
    """Writes results, one line each."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def add(self, line: str, **row: Any) -> None:
        print(line, flush=True)
        with (self.out / "rows.txt").open("a") as text, (self.out / "rows.jsonl").open("a") as lines:
            text.write(line + "\n")
            lines.write(json.dumps(row) + "\n")


def load(daemon: Daemon, name: str, out: Path, *options: str) -> dict[str, Any]:
    """Runs `weft load` and returns its run; the whole report is in `OUT/load-NAME.json`."""
    file = out / f"load-{name}.json"
    command = [sys.executable, "-m", "weft.server", "load", "--server", daemon.url, "--quiet", "--json", str(file),
               "--extra", '{"temperature": 0}', *options]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    if not file.exists():
        raise SystemExit(f"weft load {name}: {ended.returncode}\n{(ended.stdout + ended.stderr)[-2000:]}")
    return dict(json.loads(file.read_text())["runs"][0])


def iterations(daemon: Daemon) -> float:
    return sum(count for name, count in daemon.totals().items() if name.startswith("weft_iterations_total"))


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
    # Counters of the engine: a step there and a gap at the client differ by the time in between.
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
    daemon: Daemon, name: str, out: Path, requests: list[tuple[float, int, int]], drain: float, seed: int
) -> list[dict[str, Any]]:
    """Sends requests (arrival, prompt, answer) and returns their records. Loads with one seed have the same prompts."""
    trace, record = out / f"trace-{name}.jsonl", out / f"record-{name}.jsonl"
    keys = ("at", "input_tokens", "output_tokens")
    trace.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in sorted(requests)))
    load(daemon, name, out, "--trace", str(trace), "--record", str(record), "--drain", f"{drain:.3f}s",
         "--seed", str(seed))  # fmt: skip
    found = [json.loads(line) for line in record.read_text().splitlines()]
    trace.unlink()
    record.unlink()  # megabytes; the rows keep the results
    return found


def stamps(row: dict[str, Any]) -> np.ndarray:
    """Arrival time of each token of a request."""
    if row["ttft"] is None or row["start"] is None:
        return np.zeros(0)
    return row["start"] + row["ttft"] + np.concatenate(([0.0], np.cumsum(row["itl"])))


def calibrate(daemon: Daemon, given: argparse.Namespace, rows: Rows) -> Costs:
    """Times prompts, steps and decodes next to chunks. Raises `SystemExit` if answers were too short."""
    prompt, batch = int(given.tokens * 0.94), given.batch

    def together(name: str, count: int, answer: int, seed: int) -> list[np.ndarray]:
        """Token times of `count` requests sent at once."""
        records = replay(daemon, name, rows.out, [(0.0, prompt, answer)] * count, 120.0, seed)
        came = [s for s in map(stamps, records) if len(s)]
        if len(came) < count:
            raise SystemExit(f"{name}: {count - len(came)} of {count} requests had no answer")
        return came

    def filled(came: list[np.ndarray]) -> float:
        """Seconds from the first request's first token to the last one's."""
        first = [float(s[0]) for s in came]
        return max(first) - min(first)

    def step(came: list[np.ndarray]) -> float:
        """The median gap while all requests decode and no prompt is left, after the last first token."""
        since, until = max(s[0] for s in came), min(s[-1] for s in came)
        gaps = [float(g) for s in came for g in np.diff(s[(s >= since) & (s <= until)])]
        if len(gaps) < given.probe / 2 * len(came):
            raise SystemExit(
                f"{len(gaps)} gaps of {len(came)} requests that all decode: the first request ended too early"
            )
        return float(np.median(gaps))

    before = iterations(daemon)
    prompt_s = filled(together("prompts", 8, 2, seed=2)) / 7
    chunks = (iterations(daemon) - before) / 8
    one = step(together("step-1", 1, given.probe, seed=3))
    # Earlier requests decode at least one token for each chunk of a later prompt.
    came = together(f"step-{batch}", batch, given.probe + int(1.2 * batch * (chunks + 1)), seed=4)
    many = step(came)
    each = max(0.0, (many - one) / (batch - 1))
    # While each prompt is computed, 1, 2, ... earlier requests decode.
    riding = max(0.0, filled(came) - (batch - 1) * prompt_s) / (chunks * batch * (batch - 1) / 2)
    rows.add(
        f"a prompt of {prompt} tokens {prompt_s:.3f} s in {chunks:.1f} iterations, a step of 1 request "
        f"{1e3 * one:.2f} ms, of {batch} {1e3 * many:.2f}: {1e3 * each:.3f} each, {1e3 * riding:.3f} next to a chunk",
        prompt_s=prompt_s, chunks=chunks, step_1_s=one, step_s=many, batch=batch, each_s=each, beside_chunk_s=riding,
    )  # fmt: skip
    return Costs(prompt_s, chunks, max(1e-6, one - each), each, riding)


def judge(records: list[dict[str, Any]], begin: float, end: float) -> dict[str, Any]:
    """Statistics between two times. A request without a first token by then counts with its wait so far."""
    gaps, ttft, waiting, tokens, prompts, decoding = list[float](), list[float](), 0, 0, 0, [0, 0]
    for row in records:
        came = stamps(row)
        tokens += int(((came >= begin) & (came < end)).sum())
        if len(came):
            prompts += row["input_tokens"] if begin <= came[0] < end else 0
            ended = came[-1] if row["outcome"] == "ok" else np.inf
            for i, at in enumerate((begin, end)):
                decoding[i] += bool(came[0] < at < ended)
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
        "decoding_begin": decoding[0], "decoding_end": decoding[1],
    }  # fmt: skip


def long(given: argparse.Namespace, rows: Rows) -> None:
    plan: list[Share] = []
    for way in given.way:
        name, options = way.split("=", 1)
        begun = time.monotonic()
        with _daemon(name, given, options, rows.out) as daemon:
            # Warm up every kernel, chunks next to decodes included.
            replay(daemon, f"warm-{name}", rows.out, [(0.0, int(given.tokens * 0.94), 30)] * 3, 60.0, seed=1)
            plan = plan or _plan(daemon, given, rows)
            for seed, share in enumerate(plan, start=10):
                _share(daemon, share, seed, rows)
        rows.add(f"{name}: {time.monotonic() - begun:.0f} s", way=name)


def _plan(daemon: Daemon, given: argparse.Namespace, rows: Rows) -> list[Share]:
    costs = calibrate(daemon, given, rows)
    slots = int(given.num_pages * given.page_size / given.tokens)
    mean = float(answers(given.tokens, 256).mean())
    capacity, most = costs.capacity(mean, slots), costs.most(mean, slots)
    rows.add(
        f"capacity {capacity:.3f} requests/s, {most} decoding; pages for {slots}",
        capacity=capacity, most=most, slots=slots,
    )  # fmt: skip
    return [
        arrivals(costs, float(share), given.tokens, slots, given.settle, given.seconds, seed)
        for seed, share in enumerate(given.shares.split(","))
    ]


def _share(daemon: Daemon, share: Share, seed: int, rows: Rows) -> None:
    before = daemon.counts()
    last = max(at for at, _, _ in share.requests)
    # Unfinished requests are aborted at the end, so that the next load starts on an idle daemon.
    records = replay(
        daemon, f"{daemon.name}-{share.share}", rows.out, share.requests, share.end - last + 0.2, seed
    )  # fmt: skip
    went, found = paths(before, daemon.counts()), judge(records, share.begin, share.end)
    first = [float(came[0]) for r in records if r["at"] < share.filled and len(came := stamps(r))]
    rows.add(
        f"{share.share:.2f} of capacity, {share.rate:.3f}/s {daemon.name:6} TTFT mean {found['ttft_mean_s']:6.2f} "
        f"p50 {found['ttft_p50_s']:6.2f} p99 {found['ttft_p99_s']:6.2f} s "
        f"({found['requests']}, {found['still_waiting']} waiting) | TBT p50 {found.get('tbt_p50_ms', 0):6.1f} "
        f"p99 {found.get('tbt_p99_ms', 0):6.1f} ms, over 200 ms {100 * found['gaps_over_200_ms']:.2f} % | "
        f"{found['output_tokens_per_second']:.0f} output, {found['prompt_tokens_per_second']:.0f} prompt tokens/s | "
        f"decoding {found['decoding_begin']} to {found['decoding_end']}, expected {share.running}; ready after "
        f"{max(first, default=np.nan):.1f} s, expected {share.filled:.1f}, judged from {share.begin:.1f} | {went}",
        way=daemon.name, share=share.share, rate=share.rate, running=share.running, filled_s=share.filled,
        ready_s=max(first, default=None), **found, paths=went,
    )  # fmt: skip


@contextlib.contextmanager
def _daemon(name: str, given: argparse.Namespace, options: str, out: Path) -> Iterator[Daemon]:
    pages = (
        [] if given.num_pages is None else ["--num-pages", str(given.num_pages), "--page-size", str(given.page_size)]
    )
    daemon = Daemon(name, [*shlex.split(given.serve), *pages, *shlex.split(options)], given.port or free_port(), out)
    try:
        daemon.wait()
        yield daemon
    finally:
        daemon.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("mode", choices=("online", "long"))
    parser.add_argument("--serve", required=True, help="options of all daemons")
    parser.add_argument(
        "--way", action="append", required=True, metavar="NAME=OPTIONS", help="name and options of one daemon"
    )
    parser.add_argument("--port", type=int, help="port of the daemons (default: a free one)")
    parser.add_argument(
        "--seconds", type=float, default=22, help="seconds of arrivals at each rate, or judged seconds with `long`"
    )
    parser.add_argument("--rates", default="29.2,38.6,14.4", help="requests a second")
    parser.add_argument("--load", default="--processes 2", help="options of weft load")
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument("--drain", type=float, default=12)
    parser.add_argument("--num-pages", type=int, help="KV pages of each daemon (default with `long`: 12000)")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--shares", default="0.7,0.95", help="shares of the capacity")
    parser.add_argument("--settle", type=float, default=3, help="seconds of arrivals before the judged time")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--batch", type=int, default=16, help="number of requests whose step is timed")
    parser.add_argument("--probe", type=int, default=60, help="tokens that each of them decodes while all decode")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.mode == "long":
        given.num_pages = given.num_pages or 12000
    (online if given.mode == "online" else long)(given, Rows(given.out))


if __name__ == "__main__":
    main()
