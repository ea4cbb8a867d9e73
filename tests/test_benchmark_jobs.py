"""Benchmark jobs state their question, hardware and time, are listed in the README, and import what exists."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from weft.engine.wire.child import command

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "benchmarks/jobs"
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
"""Prints the imports that fail in the given scripts, without running them: some work at import."""
MODULES = r"python -m (weft[\w.]+)"
NAMED = r"(?:benchmarks|tests|engine|kernels|tools)/[\w./-]+\.(?:py|sh|json)"


@pytest.fixture
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return job_module("long_prompts_load", monkeypatch)


def job_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(JOBS)
    return importlib.import_module(name)


def environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that `run.py` gives to jobs."""
    monkeypatch.delenv("WHEELS", raising=False)
    made: dict[str, str] = job_module("run", monkeypatch).prepared(place)
    return made


def script(name: str) -> str:
    return (JOBS / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_job_states_question_hardware_time_and_how_to_read_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = job_module("run", monkeypatch).header(name)
    assert list(fields) == ["question", "hardware", "time", "run", "read"]
    assert fields["question"].endswith("?")
    assert fields["hardware"] in ("1 GPU", "2 GPUs", "4 GPUs")
    seconds, unit = fields["time"].split()
    assert unit == "s"
    assert 0 < int(seconds) <= 600
    lane = "--lane" if fields["hardware"] == "1 GPU" else "--all"
    assert fields["run"].splitlines()[0] == f"python benchmarks/jobs/run.py build/jobs {lane} {name}"
    subprocess.run(["bash", "-n", str(JOBS / f"{name}.sh")], check=True, timeout=60)


def test_the_readme_lists_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run = job_module("run", monkeypatch)
    rows = [line for line in (JOBS / "README.md").read_text().splitlines() if line.startswith("| [")]
    expected = []
    for name in NAMES:
        fields = run.header(name)
        minutes = max(1, round(int(fields["time"].split()[0]) / 60))
        expected.append(f"| [{name}]({name}.sh) | {fields['question']} | {fields['hardware']} | {minutes} |")
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_calls_files_and_modules_that_exist(name: str) -> None:
    text = script(name)
    for path in re.findall(NAMED, text):
        assert (ROOT / path).exists(), path
    for module in re.findall(MODULES, text):
        assert importlib.util.find_spec(module) is not None, module
    for module, attribute in re.findall(r"from (weft[\w.]+) import (\w+)", text):
        assert hasattr(importlib.import_module(module), attribute), f"{module}.{attribute}"


def test_jobs_select_tests_that_exist() -> None:
    there = "".join(path.read_text() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    for test in re.findall(r"::(test_\w+)", "".join(map(script, NAMES))):
        assert f"def {test}(" in there, test


def test_an_unknown_job_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(JOBS / "run.py"), str(tmp_path / "out"), "--lane", *NAMES[:1], "nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stderr.startswith("no job nowhere: choose from ")
    assert not (tmp_path / "out").exists()


def test_scripts_find_what_they_import_where_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment(tmp_path, monkeypatch)
    assert made["PYTHONSAFEPATH"] == "1"
    command = [sys.executable, "-c", IMPORTS, *sorted(map(str, JOBS.glob("*.py")))]
    ended = subprocess.run(command, env=made, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_a_script_that_imports_another_starts_where_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, made = [sys.executable, str(JOBS / "latency.py"), "--help"], environment(tmp_path, monkeypatch)
    ended = subprocess.run(command, env=made, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert "--port" in ended.stdout


@pytest.mark.parametrize(("answer", "slots"), [(900, 44), (300, 44), (900, 10)])
def test_the_capacity_for_long_prompts_equals_a_simulation(answer: int, slots: int, long_prompts: ModuleType) -> None:
    costs = long_prompts.Costs(prompt_s=0.45, chunks=15, step_s=0.005, each_s=0.0005, beside_s=0.0006)
    clock, ended, chunk, left = 0.0, np.zeros(0), 0, np.zeros(0)
    while len(ended) < 300:  # a prompt is always waiting
        if len(left) < slots:
            clock += costs.prompt_s / costs.chunks + len(left) * costs.beside_s
            chunk += 1
        else:
            clock += costs.step_s + len(left) * costs.each_s
        left = left - 1
        ended = np.append(ended, [clock] * int((left <= 0).sum()))
        left = left[left > 0]
        if chunk == costs.chunks:
            left, chunk = np.append(left, answer), 0
    assert 200 / (ended[299] - ended[99]) == pytest.approx(costs.capacity(answer, slots), rel=0.03)


def test_arrivals_of_long_prompts_match_their_share(long_prompts: ModuleType) -> None:
    costs = long_prompts.Costs(prompt_s=0.45, chunks=15, step_s=0.005, each_s=0.0005, beside_s=0.0006)
    mean = float(long_prompts.answers(16_500, 256).mean())
    for share in (0.7, 0.95):
        found = long_prompts.arrivals(costs, share, 16_500, 44, 3.0, 26.0, 1)
        assert found.rate == pytest.approx(share * costs.capacity(mean, 44))
        first, later = found.requests[: found.running], found.requests[found.running :]
        assert costs.request_s(mean, found.running) <= 1 / found.rate < costs.request_s(mean, found.running - 1)
        assert all(at < found.filled for at, _, _ in first)
        assert all(found.filled <= at < found.end for at, _, _ in later)
        assert len(later) == round(found.rate * 29.0)
        assert np.mean([answer for _, _, answer in later]) == pytest.approx(mean, rel=0.03)
        assert all(prompt + answer == 16_500 for _, prompt, answer in found.requests)
        assert found == long_prompts.arrivals(costs, share, 16_500, 44, 3.0, 26.0, 1)  # the same for every daemon


def test_rows_of_ranks_have_the_columns_of_the_results_page(monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads((ROOT / "benchmarks/results/tensor-parallel-70b.json").read_text())
    report = {
        "workload": "1024:512:1000", "total_tokens_per_second": 13625.4, "optimum_tokens_per_second": 18260.0,
        "watts": 2765.2, "tokens_per_joule": 4.92, "start_seconds": {"in all": 21.0},
        "then 512:512:1000": {"total_tokens_per_second": 13594.0},
    }  # fmt: skip
    first, second = job_module("rank_rows", monkeypatch).rows(4, report)
    assert len(first) == len(second) == len(table["columns"])
    assert first == ["4, 1024 / 512 x 1000", 13625, 3406, 0.746, 2765, "4.92"]
    assert second == ["4, 512 / 512 x 1000", 13594, 3398, 0.744, "", ""]


def test_several_engines_are_compared_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, speed, cached in (("one", 100.0, 50), ("several", 390.0, 49)):
        loop = {"throughput": {"output_tokens_per_second": speed, "prompt_tokens_per_second": 2 * speed}}
        (tmp_path / f"closed-{name}.json").write_text(json.dumps({"runs": [loop]}))
        talk = {"tokens": {"prompt_cached": cached, "prompt_received": 100}}
        (tmp_path / f"talk-{name}.json").write_text(json.dumps({"runs": [talk]}))
    found = job_module("compare_engines", monkeypatch).compared(tmp_path, 4)
    assert found["output_tokens_per_second"] == {"one": 100.0, "several": 390.0, "ratio": 3.9}
    assert found["cached"]["ratio"] == pytest.approx(0.98)


def test_free_port_returns_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", job_module("free_port", monkeypatch).free_port()))


def test_only_engines_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_module("kill_engine", monkeypatch)
    modules = {7: "weft.engine.process", 8: "weft.server.daemon.worker", 9: "weft.engine.process", 10: "weft.server"}
    lines = {pid: list(command(1, module)) for pid, module in modules.items()}
    monkeypatch.setattr(job, "children", lambda _: list(lines))
    monkeypatch.setattr(job, "command_line", lines.__getitem__)
    assert job.engines(1) == [7, 9]
