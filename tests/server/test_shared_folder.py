"""The folder shared by API processes: none is left behind, and none in use is removed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft.server.daemon.shared_folder import SharedFolder

KILLED = """
import os, signal
from pathlib import Path
from weft.server.daemon.shared_folder import SharedFolder
folder = SharedFolder()
Path(folder.name, "responses").write_text("what a user said")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_daemons_folder_is_removed_by_the_next_and_a_live_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = SharedFolder()
    assert stat.S_IMODE(os.stat(living.name).st_mode) == 0o700
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", KILLED], env=environment, timeout=240)
    (left,) = set(tmp_path.iterdir()) - {Path(living.name)}
    assert [file.name for file in left.iterdir()] == ["responses"]
    following = SharedFolder()
    assert set(tmp_path.iterdir()) == {Path(living.name), Path(following.name)}
    living.cleanup()
    del following
    assert not list(tmp_path.iterdir())
