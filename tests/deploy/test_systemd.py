"""The units of deploy/systemd fit each other and the daemon's options, and systemd accepts them."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from files import DEPLOY, read_yaml

from weft.server.config import ServeConfig
from weft.server.daemon.daemon import FAREWELL_SECONDS, STOP_SECONDS

UNITS = DEPLOY / "systemd"
SERVICES = ("weft.service", "weft@.service")


def settings(name: str) -> dict[str, str]:
    lines = [line for line in (UNITS / name).read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


DRAIN: float = ServeConfig.model_fields["drain_timeout"].default
ENDS = DRAIN + FAREWELL_SECONDS + 2 * STOP_SECONDS
"""seconds after which a stopped daemon has ended"""


def test_containers_are_not_killed_while_they_drain() -> None:
    service = read_yaml(DEPLOY / "compose.yaml")["services"]["weft"]
    assert int(service["stop_grace_period"].removesuffix("s")) > ENDS
    runs = [line for line in (DEPLOY / "../Dockerfile").read_text().splitlines() if "docker run" in line]
    seconds = [int(found[1]) for line in runs if (found := re.search(r"--stop-timeout (\d+)", line))]
    assert len(seconds) == len(runs)
    assert min(seconds) > ENDS


@pytest.mark.parametrize("name", SERVICES)
def test_a_stop_leaves_time_to_drain_and_does_not_signal_processes(name: str) -> None:
    unit = settings(name)
    assert int(unit["TimeoutStopSec"]) > ENDS
    assert unit["KillMode"] == "mixed"  # signalling all processes at once would cut streams
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "main")


def test_the_instances_differ_from_the_service_only_in_the_handover() -> None:
    one, two = ((UNITS / name).read_text().partition("[Unit]")[2].splitlines() for name in SERVICES)
    changed = [line for line in difflib.ndiff(one, two) if line[0] in "+-"]
    assert [line[2:].partition("=")[0] for line in changed] == ["Description", "Description", "ExecStart", "ExecStart"]
    assert "--handover" in settings("weft@.service")["ExecStart"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for file in UNITS.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("/opt/weft/bin/weft", "/bin/true"))
    for name in ("weft.service", "weft.socket", "weft@blue.service"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
