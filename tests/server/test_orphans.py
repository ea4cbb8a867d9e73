"""`Orphans`: processes inherited by a container's first process are reaped; its own children are left alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, os, subprocess, sys, time
from weft.server.daemon.orphans import Orphans, _ended_children

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0  # as process 1 of a container is
started = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', ''])"
orphans = Orphans()
subprocess.run([sys.executable, "-c", started], check=True)
until = time.monotonic() + 240
while not (found := list(_ended_children())) and time.monotonic() < until:
    time.sleep(0.02)
assert len(found) == 1, found
assert orphans.reap() == []  # it may be somebody's who is about to wait
mine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
while len(list(_ended_children())) < 2 and time.monotonic() < until:
    time.sleep(0.02)
assert orphans.reap() == found
assert mine.wait(240) == 3
assert orphans.reap() == []
assert list(_ended_children()) == []
"""


def test_an_orphan_is_recorded_at_the_second_check_and_an_own_child_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
