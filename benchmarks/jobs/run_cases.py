"""Runs test cases in separate processes with a time limit each, for kernels that may hang.

    python benchmarks/jobs/run_cases.py OUT [--seconds 90] [--processes 12] [--together REGEX] [--once REGEX] FILE...

A case that hangs is named and the others continue. Cases run twice: first many processes in parallel, to compile, with
results ignored (warp-specialized kernels have hung next to other processes on a GPU); then one at a time. Cases whose
names are equal after REGEX is cut out share a process, because they compile the same kernels; each keeps its own time
limit, and after a hang a new process runs the rest. `OUT/cases.txt` has one line a case as it ends, `OUT/NAME.txt`
has pytest's output of a case that failed or hung, `OUT/files.txt` has one line a file. The exit status is 1 unless all
cases passed or were skipped.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BEGINNING_SECONDS = 90.0
"""Time limit until a process begins its first case."""
PLUGIN = """
import os, time
def _say(*words):
    with open(os.environ["EACH_CASES"], "a") as out:
        print(*words, file=out, flush=True)
def pytest_runtest_logstart(nodeid, location):
    _say("begin", nodeid)
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _say(report.outcome if report.when == "call" or report.skipped else "failed", report.nodeid)
"""
"""A pytest plugin that writes each result to a file, because the output of a hung process may be buffered."""


class Cases:
    """Collects results and writes each one as it arrives."""

    def __init__(self, out: Path | None) -> None:
        """out: the folder for results; None writes nothing."""
        self._out, self._lock = out, threading.Lock()
        self.results: dict[str, str] = {}

    def add(self, case: str, result: str, seconds: float, said: str) -> None:
        with self._lock:
            self.results[case] = result
        if self._out is None:
            return
        with self._lock, (self._out / "cases.txt").open("a") as lines:
            line = f"{result:8} {seconds:6.1f} s {case}"
            print(line, flush=True)
            lines.write(line + "\n")
        if result not in ("passed", "skipped"):
            name = re.sub(r"[^\w.-]+", "_", case.split("/")[-1])[:120]
            (self._out / f"{name}.txt").write_text(said[-20000:])


def collect(files: list[str]) -> list[str]:
    """Names of all cases. Raises `SystemExit` with pytest's output if there are none."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    ended = subprocess.run(command, capture_output=True, text=True)
    cases = [line for line in ended.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "="))]
    if not cases or ended.returncode:
        raise SystemExit(f"cannot collect cases:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    return cases


def run(cases: list[str], seconds: float, into: Cases, place: Path) -> None:
    """Runs the cases in one process; after a hang or a crash a new process continues."""
    left = list(cases)
    while left:
        left = left[_some(left, seconds, into, place) :]


def _some(cases: list[str], seconds: float, into: Cases, place: Path) -> int:
    """Runs cases in one process and returns how many of the first have a result: at least one."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        said, log = Path(folder) / "said", Path(folder) / "log"
        said.touch()
        environment = {**os.environ, "EACH_CASES": str(said), "PYTHONPATH": os.pathsep.join(
            [str(place), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "each_plugin",
                   "-p", "no:cacheprovider", *cases]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        done, hung, begun = 0, False, time.monotonic()
        last: list[str] = []
        while True:
            ended = process.poll() is not None
            lines = [line.split(" ", 1) for line in said.read_text().splitlines() if " " in line]
            results = [(case, how) for how, case in lines if how != "begin"]
            for case, how in results[done:]:
                if into.results.get(case) is None:
                    into.add(case, how, time.monotonic() - begun, log.read_text(errors="replace"))
                done += 1
            if lines and lines[-1] != last:  # the time of a case starts when pytest begins it
                last, begun = lines[-1], time.monotonic()
            if ended:
                break
            if time.monotonic() - begun > (seconds if lines else max(seconds, BEGINNING_SECONDS)):
                hung = True
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                break
            time.sleep(0.1)
        have = sum(case in into.results for case in cases)
        if hung or not have:  # the process wrote no result for its current case
            case = next(c for c in cases if c not in into.results)
            how = "HUNG" if hung else "ended"
            detail = f"{how} {'after ' + ' '.join(last) if last else 'before any'}, exit status {process.returncode}\n"
            into.add(case, how, time.monotonic() - begun, detail + log.read_text(errors="replace"))
            have += 1
        return have


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+", help="test files or single cases, in order")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a case, compilation included")
    parser.add_argument("--processes", type=int, default=12, help="parallel processes that compile; 0 skips that pass")
    parser.add_argument(
        "--together", metavar="REGEX", help="part of a name to ignore when cases are grouped into processes"
    )
    parser.add_argument("--once", metavar="REGEX", help="cases to leave out of the compile pass")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cases = collect(given.files)
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for case in cases:
        if given.once and re.search(given.once, case):
            continue
        groups[re.sub(given.together, "", case) if given.together else case].append(case)
    print(f"{len(cases)} cases, {len(groups)} processes to compile", flush=True)
    into = Cases(given.out)
    with tempfile.TemporaryDirectory(prefix="weft-each-") as folder:
        place = Path(folder)
        (place / "each_plugin.py").write_text(PLUGIN)
        if given.processes:
            begun, compiled = time.monotonic(), Cases(None)
            with ThreadPoolExecutor(given.processes) as pool:
                for ran in [pool.submit(run, group, given.seconds, compiled, place) for group in groups.values()]:
                    ran.result()
            print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
        run(cases, given.seconds, into, place)
    with (given.out / "files.txt").open("w") as lines:
        for file in dict.fromkeys(case.split("::")[0] for case in cases):
            counts = collections.Counter(how for case, how in into.results.items() if case.split("::")[0] == file)
            line = f"{file}: " + ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
            print(line, flush=True)
            lines.write(line + "\n")
    return 0 if set(into.results.values()) <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
