"""Run measuring jobs on a machine with GPUs: those that want all of them one after the other, then a lane for each GPU.

    python benchmarks/jobs/run.py OUT --seconds 590 --all tp-search --lane pod-bench mid --lane hang

A job is `NAME.sh` beside this file. Its first lines say what it takes and what it answers:

    # seconds 250
    # gpus 1
    # asks: what it is for, what counts as an answer and what is decided by it

It runs in the repository's root with `python -m weft.server` at hand and these variables: `OUT`, a folder of its own
for what it leaves (others' are beside it); `SECONDS_LEFT`, after which it is ended (its `# seconds` and half as many
again, at most what is left of the whole); `CUDA_VISIBLE_DEVICES` in a lane. What it prints goes to `OUT/log.txt`.

`WHEELS`: a folder of wheels that are put beside the machine's packages first (for one without a package registry).
All that was left is in `OUT/jobs.tgz`, a line a job in `OUT/summary.txt`.
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
ROOT = JOBS.parents[2]
KEPT_BYTES = 4 * 2**20
"""of a file that goes into the archive: a longer one is left out and named"""
PACKING_SECONDS = 8.0


def header(name: str) -> dict[str, str]:
    """What a job says of itself. Raises `SystemExit` for one that is not there."""
    path = JOBS / f"{name}.sh"
    if not path.is_file():
        there = ", ".join(sorted(path.stem for path in JOBS.glob("*.sh")))
        raise SystemExit(f"no job {name}: there are {there}")
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.removeprefix("# ").partition(" ")
        if key in ("seconds", "gpus", "asks:") and key.rstrip(":") not in fields:
            fields[key.rstrip(":")] = value
    return fields


class Runs:
    """Runs jobs until a time has come, and keeps what they left."""

    def __init__(self, out: Path, seconds: float, environment: dict[str, str]) -> None:
        self._out = out
        self._end = time.monotonic() + seconds - PACKING_SECONDS
        self._environment = environment
        self._lock = threading.Lock()

    def lane(self, names: list[str], visible: str | None) -> None:
        """One after the other, on these devices; on all for None."""
        for name in names:
            self._run(name, visible)

    def _run(self, name: str, visible: str | None) -> None:
        begun = time.monotonic()
        seconds = min(1.5 * float(header(name)["seconds"]), self._end - begun)
        if seconds <= 0:
            self._note(f"{name}: not begun, no time was left")
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
                how = "ended: it ran too long"
            # Daemons that it left behind would disturb whoever comes next.
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
        """All that was left, but for files that are too long."""
        with tarfile.open(self._out / "jobs.tgz", "w:gz") as archive:
            for path in sorted(self._out.rglob("*")):
                if path.is_file() and path.suffix != ".tgz":
                    if path.stat().st_size > KEPT_BYTES:
                        self._note(f"{path.relative_to(self._out)}: left out, {path.stat().st_size:,} bytes")
                    else:
                        archive.add(path, path.relative_to(self._out))


def prepared(place: Path) -> dict[str, str]:
    """The environment of jobs: the package, and packages that this machine lacks, in an empty folder."""
    (place / "weft").symlink_to(ROOT)
    paths = [str(place), str(JOBS)]  # jobs import each other: a safe path leaves the folder of a script out
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
    parser.add_argument("out", type=Path, help="folder for what the jobs leave")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it (default: an hour)")
    parser.add_argument("--all", nargs="*", default=[], metavar="JOB", help="with all GPUs, one after the other, first")
    parser.add_argument(
        "--lane", nargs="*", action="append", default=[], metavar="JOB", help="on the next GPU, beside other lanes"
    )
    options = parser.parse_args()
    for name in [*options.all, *(name for lane in options.lane for name in lane)]:
        header(name)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-jobs-") as place:
        environment = prepared(Path(place))
        runs = Runs(options.out.resolve(), options.seconds - (time.monotonic() - begun), environment)
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
