"""The scripts that measure on GPUs: each says what it takes and asks, and finds what it imports."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

JOBS = Path(__file__).parent / "gpu/jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.sh"))
IMPORTS = """
import ast, sys
for name in sys.argv[1:]:
    for node in ast.walk(ast.parse(open(name).read())):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            try:
                exec(ast.unparse(node))
            except ImportError as error:
                print(f"{name}:{node.lineno}: {error}")
"""
"""Prints which imports of the scripts that it is given fail. Some scripts do their work as they are imported."""


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return beside_jobs("steady", monkeypatch)


def beside_jobs(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(JOBS)
    return importlib.import_module(name)


def environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of jobs, as `run.py` makes it."""
    monkeypatch.delenv("WHEELS", raising=False)
    made: dict[str, str] = beside_jobs("run", monkeypatch).prepared(place)
    return made


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


def test_scripts_find_what_they_import_where_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment(tmp_path, monkeypatch)
    assert made["PYTHONSAFEPATH"] == "1"
    command = [sys.executable, "-c", IMPORTS, *sorted(map(str, JOBS.glob("*.py")))]
    ended = subprocess.run(command, env=made, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_a_script_that_imports_another_starts_where_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, made = [sys.executable, str(JOBS / "slo.py"), "--help"], environment(tmp_path, monkeypatch)
    ended = subprocess.run(command, env=made, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert "--port" in ended.stdout


@pytest.mark.parametrize(("answer", "seats"), [(900, 44), (300, 44), (900, 10)])
def test_the_capacity_for_long_prompts_is_what_iterations_one_by_one_come_to(
    answer: int, seats: int, steady: ModuleType
) -> None:
    costs = steady.Costs(prompt_s=0.45, chunks=15, step_s=0.005, each_s=0.0005, beside_s=0.0006)
    clock, ended, chunk, left = 0.0, np.zeros(0), 0, np.zeros(0)
    while len(ended) < 300:  # there is always a prompt to begin
        if len(left) < seats:
            clock += costs.prompt_s / costs.chunks + len(left) * costs.beside_s
            chunk += 1
        else:
            clock += costs.step_s + len(left) * costs.each_s
        left = left - 1
        ended = np.append(ended, [clock] * int((left <= 0).sum()))
        left = left[left > 0]
        if chunk == costs.chunks:
            left, chunk = np.append(left, answer), 0
    assert 200 / (ended[299] - ended[99]) == pytest.approx(costs.capacity(answer, seats), rel=0.03)


def test_long_requests_are_as_many_as_their_share_says(steady: ModuleType) -> None:
    costs = steady.Costs(prompt_s=0.45, chunks=15, step_s=0.005, each_s=0.0005, beside_s=0.0006)
    mean = float(steady.answers(16_500, 256).mean())
    for share in (0.7, 0.95):
        found = steady.arrivals(costs, share, 16_500, 44, 3.0, 26.0, 1)
        assert found.rate == pytest.approx(share * costs.capacity(mean, 44))
        first, later = found.requests[: found.running], found.requests[found.running :]
        assert costs.request_s(mean, found.running) <= 1 / found.rate < costs.request_s(mean, found.running - 1)
        assert all(at < found.filled for at, _, _ in first)
        assert all(found.filled <= at < found.end for at, _, _ in later)
        assert len(later) == round(found.rate * 29.0)
        assert np.mean([answer for _, _, answer in later]) == pytest.approx(mean, rel=0.03)
        assert all(prompt + answer == 16_500 for _, prompt, answer in found.requests)
        assert found == steady.arrivals(costs, share, 16_500, 44, 3.0, 26.0, 1)  # for every daemon


def test_a_port_that_is_found_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", beside_jobs("free_port", monkeypatch).free_port()))
