"""Runs benchmark jobs on a machine with GPUs: first those that use every GPU, then one lane of jobs per GPU.

    python benchmarks/jobs/run.py OUT --seconds 590 --all tp-plan-search --lane hybrid-attention mid-gemms --lane advise

A job is a script `NAME.sh` in this folder. Its first comment lines state its question, hardware, time, how to run it
and how to read its answer; README.md lists them all.

A job runs in the repository root, can call `python -m weft.server`, and gets these variables: `OUT`, its own folder
for results, a sibling of the other jobs' folders; `SECONDS_LEFT`, its time limit (`--factor` times its `Time`, or the
rest of `--seconds`); and `CUDA_VISIBLE_DEVICES` in a lane. Its output goes to `OUT/log.txt`.

Set `WHEELS` to a folder of wheels on a machine without a package registry; they are installed for the jobs first.
`OUT/summary.txt` has one line a job, `OUT/jobs.tgz` has all results.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

JOBS = Path(__file__).parent
ROOT = JOBS.parents[1]
KEPT_BYTES = 4 * 2**20
"""Size limit of a file in the archive; larger files are left out and named."""
PACKING_SECONDS = 8.0


def header(name: str) -> dict[str, str]:
    """A job's header fields: question, hardware, time, run, read. Raises `SystemExit` if there is no such job."""
    path = JOBS / f"{name}.sh"
    if not path.is_file():
        there = ", ".join(sorted(path.stem for path in JOBS.glob("*.sh")))
        raise SystemExit(f"no job {name}: choose from {there}")
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            break
        if line.startswith("#     "):
            fields[list(fields)[-1]] += "\n" + line.removeprefix("#     ")
        else:
            key, _, value = line.removeprefix("# ").partition(": ")
            fields[key.lower()] = value
    return fields


class Runs:
    """Runs jobs within a time limit and packs their results."""

    def __init__(self, out: Path, seconds: float, environment: dict[str, str], factor: float) -> None:
        self._out, self._factor = out, factor
        self._end = time.monotonic() + seconds - PACKING_SECONDS
        self._environment = environment
        self._lock = threading.Lock()

    def lane(self, names: list[str], visible: str | None) -> None:
        """Runs the jobs in sequence on the visible devices; None means all devices."""
        for name in names:
            self._run(name, visible)

    def _run(self, name: str, visible: str | None) -> None:
        begun = time.monotonic()
        seconds = min(self._factor * float(header(name)["time"].split()[0]), self._end - begun)
        if seconds <= 0:
            self._note(f"{name}: not started, no time was left")
            return
        folder = self._out / name
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**self._environment, "OUT": str(folder), "SECONDS_LEFT": str(int(seconds))}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        with (folder / "log.txt").open("wb") as log:
            command = ["bash", str(JOBS / f"{name}.sh")]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                how = f"exit status {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                how = "stopped at its time limit"
            # Daemons that it left running would disturb the next job.
            self._end_group(process.pid)
            process.wait()
        self._note(f"{name}: {how} after {time.monotonic() - begun:.0f} s")

    @staticmethod
    def _end_group(group: int) -> None:
        for signum, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.0)):
            try:
                os.killpg(group, signum)
            except ProcessLookupError:
                return
            time.sleep(seconds)

    def _note(self, line: str) -> None:
        with self._lock, (self._out / "summary.txt").open("a") as summary:
            print(line, flush=True)
            summary.write(f"{line}\n")

    def pack(self) -> None:
        """Packs all results, except files above the size limit."""
        with tarfile.open(self._out / "jobs.tgz", "w:gz") as archive:
            for path in sorted(self._out.rglob("*")):
                if path.is_file() and path.suffix != ".tgz":
                    if path.stat().st_size > KEPT_BYTES:
                        self._note(f"{path.relative_to(self._out)}: left out, {path.stat().st_size:,} bytes")
                    else:
                        archive.add(path, path.relative_to(self._out))


def prepared(place: Path) -> dict[str, str]:
    """The environment of jobs: puts weft, this folder and the wheels of `WHEELS` on the path. `place` must be empty."""
    (place / "weft").symlink_to(ROOT)
    paths = [str(place), str(JOBS)]  # scripts here import each other, and a safe path omits their folder
    if wheels := os.environ.get("WHEELS"):
        site = place / "site"
        files = [str(path) for path in sorted(Path(wheels).glob("*.whl"))]
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *files], check=True)
        paths.append(str(site))
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of the whole run (default: 3600)")
    parser.add_argument("--factor", type=float, default=1.5, help="time limit of a job, times its time (default: 1.5)")
    parser.add_argument(
        "--all", nargs="*", default=[], metavar="JOB", help="jobs to run first, in sequence, with all GPUs"
    )
    parser.add_argument(
        "--lane",
        nargs="*",
        action="append",
        default=[],
        metavar="JOB",
        help="jobs for the next GPU, while the other lanes run",
    )
    options = parser.parse_args()
    for name in [*options.all, *(name for lane in options.lane for name in lane)]:
        header(name)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-jobs-") as place:
        environment = prepared(Path(place))
        runs = Runs(options.out.resolve(), options.seconds - (time.monotonic() - begun), environment, options.factor)
        try:
            runs.lane(options.all, None)
            lanes = [threading.Thread(target=runs.lane, args=(lane, str(gpu))) for gpu, lane in enumerate(options.lane)]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        finally:
            runs.pack()


if __name__ == "__main__":
    main()
