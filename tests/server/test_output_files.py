"""Output files of commands are checked before any work, with the same errors in all commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.server.daemon.cli import main

SHIPPED = str(Path(__file__).parents[2] / "engine" / "plans" / "llama-3-8b-h200.json")
COMMANDS = [
    "load --json", "load --csv", "load --record", "load --html", "fleet --json", "fleet --png",
    "search --model demo --out", "search --model demo --out x --svg", "search --model demo --out x --stages",
    "advise --out", "advise --html", "advise --png", "advise --points", f"plan show {SHIPPED} --svg",
    "bench ranks --model demo --json", "bench ranks --model demo --trace", "bench offline --json",
    "bench offline --trace", "bench scheduler --json", "bench multiround --json", "bench agent --json",
    "bench server --json", "bench iterations --out", "bench kernels --json", "bench kernels --tune",
    "demo evaluate --json", f"batch {SHIPPED}",
]  # fmt: skip
NEXT_TO = ("search --model demo --out", "search --model demo --out x --stages", "advise --points")
"""these write another file in the folder, which replaces the named one"""


def refused(command: str, file: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message, without the command's name."""
    try:
        status = main([*command.split(), str(file)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    (line,) = [line for line in reported.err.splitlines() if not line.startswith(("usage:", " "))]
    assert line.startswith("weft ")
    return line.split(": ", 1)[1].removeprefix("error: ").removeprefix("argument ")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unwritable_file_is_reported_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, missing, file = command.split()[-1], tmp_path / "none", tmp_path / "there"
    name = flag if flag.startswith("--") else "OUT.jsonl"
    assert refused(command, missing / "x", capsys) == f"{name}: cannot write {missing}/x: there is no folder {missing}"
    assert refused(command, tmp_path, capsys) == f"{name}: cannot write {tmp_path}: it is a folder"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != file)
    assert refused(command, file, capsys) == f"{name}: cannot write {file}: permission denied"
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    of_folder = f"no permission to write in the folder {tmp_path}"
    assert refused(command, tmp_path / "new", capsys) == f"{name}: cannot write {tmp_path}/new: {of_folder}"
    if command in NEXT_TO:
        assert refused(command, file, capsys) == f"{name}: cannot write {file}: {of_folder}"


@pytest.mark.parametrize(
    "command",
    [
        f"plan show {SHIPPED} --svg",
        "bench scheduler --running 2 --iterations 3 --json",
        "search --model-preset llama-3-8b --gpu h200 --budget-seconds 1e-3 --out",
    ],
)
def test_a_full_disk_is_a_one_line_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "/dev/full"]) in (1, 2)
    *progress, line = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in other for other in progress)
    assert line.endswith(": cannot write /dev/full: No space left on device")
