"""The scripts that measure on GPUs: each says what it takes and asks, and can be read by the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "gpu/jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.sh"))


@pytest.mark.parametrize("name", NAMES)
def test_a_job_says_what_it_takes_and_asks(name: str) -> None:
    lines = (JOBS / f"{name}.sh").read_text().splitlines()
    assert lines[0].split()[:2] == ["#", "seconds"]
    assert 0 < int(lines[0].split()[2]) <= 600
    assert lines[1] in ("# gpus 1", "# gpus 2", "# gpus 4")
    assert lines[2].startswith("# asks: ")
    subprocess.run(["bash", "-n", str(JOBS / f"{name}.sh")], check=True, timeout=60)


def test_a_job_that_is_not_there_begins_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(JOBS / "run.py"), str(tmp_path / "out"), "--lane", *NAMES[:1], "nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stderr.startswith("no job nowhere: there are ")
    assert not (tmp_path / "out").exists()
