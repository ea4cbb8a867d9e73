"""Daemons that differ in an option, under the same open loads: times to the first token and between tokens.

    python benchmarks/jobs/slo.py OUT online --serve "--model-preset llama-3-8b …" --way "off=--pod off" --rates 29.2
    python benchmarks/jobs/slo.py OUT long --serve "…" --num-pages 12000 --way "off=--pod off" --way "auto=--pod auto"

online: one daemon after the other, each with all of the memory; Poisson arrivals at each rate in turn, by `weft load`.
Prompts of 246 +- 547 and answers of 322 +- 244 tokens, log-normal and no longer than `sharegpt.LONGEST`, drawn so that
their means are the distribution's (a random sample of so few had 1.3 times the tokens); no two rates share a prompt.

long: one daemon after the other, each with all of the memory. Prompts and answers of 16.5K tokens together, a P:D of 8
to 24. The first daemon tells what a prompt, a step and a request beside a chunk take, of which follows a capacity
(`steady.py`). Then each daemon gets the same arrivals at shares of that, a load of its own each. As many requests as
will run, with what is left of their answers, stand at its beginning, so that a steady state is there once their prompts
are computed; what is judged comes behind that.

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
from free_port import free_port
from sharegpt import sharegpt
from steady import Costs, Share, answers, arrivals

READY_SECONDS = 180.0
TOKENS = 16_500
"""of a prompt and its answer"""


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
    daemon: Daemon, name: str, out: Path, requests: list[tuple[float, int, int]], drain: float, seed: int
) -> list[dict[str, Any]]:
    """Records of requests (arrival, prompt, answer), a row each. Loads of one seed have the same prompts."""
    trace, record = out / f"trace-{name}.jsonl", out / f"record-{name}.jsonl"
    keys = ("at", "input_tokens", "output_tokens")
    trace.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in sorted(requests)))
    load(daemon, name, out, "--trace", str(trace), "--record", str(record), "--drain", f"{drain:.3f}s",
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


def calibrate(daemon: Daemon, given: argparse.Namespace, rows: Rows) -> Costs:
    """What prompts, steps and requests beside chunks take. Raises `SystemExit` where answers were too short to tell."""
    prompt, beside = int(given.tokens * 0.94), given.beside

    def together(name: str, count: int, answer: int, seed: int) -> list[np.ndarray]:
        """When the tokens came of so many requests sent at once."""
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
        """Of gaps in which all of them decode and no prompt is left: behind the last first token."""
        since, until = max(s[0] for s in came), min(s[-1] for s in came)
        gaps = [float(g) for s in came for g in np.diff(s[(s >= since) & (s <= until)])]
        if len(gaps) < given.probe / 2 * len(came):
            raise SystemExit(f"{len(gaps)} gaps of {len(came)} requests that all decode: the first ended too early")
        return float(np.median(gaps))

    before = iterations(daemon)
    prompt_s = filled(together("prompts", 8, 2, seed=2)) / 7
    chunks = (iterations(daemon) - before) / 8
    one = step(together("step-1", 1, given.probe, seed=3))
    # Each prompt's chunks are as many tokens of those before it, or some more, for decodes take their part of a chunk.
    came = together(f"step-{beside}", beside, given.probe + int(1.2 * beside * (chunks + 1)), seed=4)
    many = step(came)
    each = max(0.0, (many - one) / (beside - 1))
    # While a prompt is computed, those before it decode: 1, 2, ... of them.
    riding = max(0.0, filled(came) - (beside - 1) * prompt_s) / (chunks * beside * (beside - 1) / 2)
    rows.add(
        f"a prompt of {prompt} tokens {prompt_s:.3f} s in {chunks:.1f} iterations, a step of 1 request "
        f"{1e3 * one:.2f} ms, of {beside} {1e3 * many:.2f}: {1e3 * each:.3f} each, {1e3 * riding:.3f} beside a chunk",
        prompt_s=prompt_s, chunks=chunks, step_1_s=one, step_s=many, beside=beside, each_s=each, beside_chunk_s=riding,
    )  # fmt: skip
    return Costs(prompt_s, chunks, max(1e-6, one - each), each, riding)


def judge(records: list[dict[str, Any]], begin: float, end: float) -> dict[str, Any]:
    """Of what came between the two times; a first token that had not come by then counts as having waited so long."""
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
            # Of all kernels, chunks beside decodes among them; what is compiled late is compiled here.
            replay(daemon, f"warm-{name}", rows.out, [(0.0, int(given.tokens * 0.94), 30)] * 3, 60.0, seed=1)
            plan = plan or _plan(daemon, given, rows)
            for seed, share in enumerate(plan, start=10):
                _share(daemon, share, seed, rows)
        rows.add(f"{name}: {time.monotonic() - begun:.0f} s", way=name)


def _plan(daemon: Daemon, given: argparse.Namespace, rows: Rows) -> list[Share]:
    costs = calibrate(daemon, given, rows)
    seats = int(given.num_pages * given.page_size / given.tokens)
    mean = float(answers(given.tokens, 256).mean())
    capacity, most = costs.capacity(mean, seats), costs.most(mean, seats)
    rows.add(
        f"capacity {capacity:.3f} requests/s, {most} decoding; pages for {seats}",
        capacity=capacity, most=most, seats=seats,
    )  # fmt: skip
    return [
        arrivals(costs, float(share), given.tokens, seats, given.settle, given.seconds, seed)
        for seed, share in enumerate(given.shares.split(","))
    ]


def _share(daemon: Daemon, share: Share, seed: int, rows: Rows) -> None:
    before = daemon.counts()
    last = max(at for at, _, _ in share.requests)
    # What is not answered at the end of what is judged is given up, so that the next load finds nothing running.
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
        f"decoding {found['decoding_begin']} to {found['decoding_end']}, expected {share.running}; these ready after "
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
    parser.add_argument("--serve", required=True, help="options of every daemon")
    parser.add_argument("--way", action="append", required=True, metavar="NAME=OPTIONS", help="of one daemon")
    parser.add_argument("--port", type=int, help="of every daemon [a free one]")
    parser.add_argument("--seconds", type=float, default=22, help="of arrivals at a rate; long: that are judged")
    parser.add_argument("--rates", default="29.2,38.6,14.4", help="requests a second")
    parser.add_argument("--load", default="--processes 2", help="options of weft load")
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument("--drain", type=float, default=12)
    parser.add_argument("--num-pages", type=int, help="of each daemon; long: 12,000 unless told otherwise")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--shares", default="0.7,0.95", help="of the capacity")
    parser.add_argument("--settle", type=float, default=3, help="seconds of arrivals before what is judged")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--beside", type=int, default=16, help="requests whose step is timed")
    parser.add_argument("--probe", type=int, default=60, help="tokens of each when all of them decode")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.mode == "long":
        given.num_pages = given.num_pages or 12000
    (online if given.mode == "online" else long)(given, Rows(given.out))


if __name__ == "__main__":
    main()
