"""`kill -9` of one engine of several under load: what was lost, and how long the others' streams stood still.

    python tests/gpu/jobs/kill_one.py OUT PORT DAEMON_PID RATE

`weft load` sends for ten seconds; in the middle of these an engine is killed. Of its record: which requests failed, and
the longest time between two tokens of those that lived through it, beside that of the seconds before.
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

import numpy as np

SECONDS, AT = 10.0, 5.0


def engines(daemon: int) -> list[int]:
    """Processes of engines that this daemon started, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == daemon and b"weft.engine" in line:
                found.append(int(entry.name))
    return sorted(found)


def generated(port: str) -> float:
    """Tokens, by the daemon's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("weft_engine_generation_tokens_total"))


def main() -> None:
    out, port, daemon, rate = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    record = out / "kill.jsonl"
    record.unlink(missing_ok=True)
    load = subprocess.Popen(
        [sys.executable, "-m", "weft.server", "load", "--server", f"http://127.0.0.1:{port}", "--rate", rate,
         "--duration", f"{SECONDS:.0f}s", "--input", "lognormal:512:256",
         "--output", os.environ.get("KILL_OUTPUT", "400"), "--seed", "7", "--record", str(record),
         "--json", str(out / "kill.json"), "--quiet"],
        stdout=(out / "kill.txt").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    before = generated(port)
    while generated(port) == before and load.poll() is None:  # it takes its time to begin
        time.sleep(0.1)
    time.sleep(AT)
    there = engines(daemon)
    os.kill(there[-1], signal.SIGKILL)
    killed = time.time()
    print(f"killed the engine {there[-1]} of {there}", flush=True)
    load.wait()
    began = datetime.strptime(json.loads((out / "kill.json").read_text())["runs"][0]["began"], "%Y-%m-%d %H:%M:%S%z")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    at = killed - began.timestamp()  # a second too late at most: that is cut to whole ones
    lost = [row for row in rows if row["outcome"] != "ok"]
    print(f"{len(rows)} requests: {dict(Counter(row['outcome'] for row in rows))}", flush=True)
    print("lost:", dict(Counter(row["error"][:80] for row in lost)), flush=True)
    begun = sum(bool(row["itl"]) or (row["ttft"] or 0) > 0 for row in lost)
    print(f"of those {begun} had begun to stream", flush=True)
    through, before, again = [], [], 0
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
            before.append(float(gaps[early].max()))
        again += row["start"] < at < first and row["ttft"] > 0.2
    if through:
        most, middle = 1e3 * max(through), 1e3 * float(np.median(through))
        print(
            f"longest gap of each of {len(through)} streams that lived through it: at most {most:.0f} ms,", flush=True
        )
        print(f"median {middle:.0f}; of {len(before)} before it: {1e3 * max(before, default=0):.0f}", flush=True)
    print(f"{again} requests that were sent before the kill had their first token late behind it", flush=True)


if __name__ == "__main__":
    main()
