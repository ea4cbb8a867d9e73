"""Kills one of several engines under load: which requests are lost, and how long the other streams pause.

    python benchmarks/jobs/kill_engine.py OUT PORT DAEMON_PID LOAD

LOAD is a rate, or `users=N` for a closed loop. `weft load` sends for ten seconds (KILL_SECONDS). The newest engine is
killed halfway, or none if DAEMON_PID is 0. The script prints output tokens/s before and after the kill, the requests
that failed, and the longest gap between tokens of the other streams, around the kill and before it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from children import children, command_line

SECONDS = float(os.environ.get("KILL_SECONDS", "10"))
AT = SECONDS / 2
EDGE = 1.5
"""Seconds after the start and after a kill that are left out of the token rates."""


def engines(daemon: int) -> list[int]:
    """Engine processes of this daemon, oldest first."""
    return [pid for pid in children(daemon) if "weft.engine.process" in command_line(pid)]


def generated(port: str) -> float:
    """Generated tokens by the daemon's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("weft_engine_generation_tokens_total"))


def rate(rows: list[dict[str, Any]], begin: float, end: float) -> float:
    """Output tokens per second between two times, failed requests included."""
    count = 0
    for row in rows:
        if row["ttft"] is not None:
            times = row["start"] + row["ttft"] + np.cumsum([0.0, *row["itl"]])
            count += int(np.count_nonzero((times >= begin) & (times < end)))
    return count / max(1e-9, end - begin)


def main() -> None:
    out, port, daemon, asked = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    name = "kill" if daemon else "alone"
    sent = ["--users", asked.removeprefix("users=")] if asked.startswith("users=") else ["--rate", asked]
    record = out / f"{name}.jsonl"
    record.unlink(missing_ok=True)
    load = subprocess.Popen(
        [sys.executable, "-m", "weft.server", "load", "--server", f"http://127.0.0.1:{port}", *sent,
         "--duration", f"{SECONDS:.0f}s", "--input", os.environ.get("KILL_INPUT", "lognormal:512:256"),
         "--output", os.environ.get("KILL_OUTPUT", "400"), "--seed", "7", "--record", str(record),
         "--json", str(out / f"{name}.json"), "--quiet"],
        stdout=(out / f"{name}.txt").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    none = generated(port)
    while generated(port) == none and load.poll() is None:  # the load needs time to start
        time.sleep(0.1)
    time.sleep(AT)
    if daemon:
        there = engines(daemon)
        os.kill(there[-1], signal.SIGKILL)
        print(f"killed the engine {there[-1]} of {there}", flush=True)
    killed = time.time()
    load.wait()
    said = json.loads((out / f"{name}.json").read_text())["runs"][0]["began"]
    began = datetime.strptime(said, "%Y-%m-%d %H:%M:%S%z")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    at = killed - began.timestamp()  # up to a second too late: `began` has whole seconds
    before, after = rate(rows, EDGE, at - 1), rate(rows, at + EDGE, SECONDS)
    print(f"output tokens/s: {before:,.0f} before the middle, {after:,.0f} after it", flush=True)
    lost = [row for row in rows if row["outcome"] != "ok"]
    print(f"{len(rows)} requests: {dict(Counter(row['outcome'] for row in rows))}", flush=True)
    print("lost:", dict(Counter(row["error"][:80] for row in lost)), flush=True)
    begun = sum(bool(row["itl"]) or (row["ttft"] or 0) > 0 for row in lost)
    print(f"{begun} of the lost requests had begun to stream", flush=True)
    if not daemon:
        return
    through, earlier, again = [], [], 0
    for row in rows:
        if row["outcome"] != "ok" or row["ttft"] is None:
            continue
        first = row["start"] + row["ttft"]
        times = first + np.cumsum([0.0, *row["itl"]])
        gaps = np.diff(times)
        around = (times[1:] > at - 1) & (times[:-1] < at + 4)
        if first < at - 1 and times[-1] > at and around.any():
            through.append(float(gaps[around].max()))
        early = times[1:] < at - 1
        if early.any():
            earlier.append(float(gaps[early].max()))
        again += row["start"] < at < first and row["ttft"] > 0.2
    if through:
        most, middle = 1e3 * max(through), 1e3 * float(np.median(through))
        print(f"longest gap of each of {len(through)} streams that survived: at most {most:.0f} ms,", flush=True)
        print(
            f"median {middle:.0f}; of {len(earlier)} before the kill: {1e3 * max(earlier, default=0):.0f}", flush=True
        )
    print(f"{again} requests sent before the kill got their first token late", flush=True)


if __name__ == "__main__":
    main()
