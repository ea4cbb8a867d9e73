"""Directories of killed daemons are cleaned up; those of living ones, and what is not a daemon's, stay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft.engine.errors import ConfigError
from weft.engine.wire import private_dir
from weft.engine.wire.private_dir import PrivateDir, remove_stale


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def killed(tmp_path: Path) -> Path:
    """The directory of a process that ended without removing it."""
    code = f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
    code += "from weft.engine.wire.private_dir import PrivateDir\nprint(PrivateDir().path, flush=True); os._exit(9)"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False).stdout
    return Path(out.strip())


def test_a_dead_daemons_directory_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    dead = killed(tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead / "engine.sock"))
    living = PrivateDir()
    assert not dead.exists()
    remove_stale()
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.remove()
    assert not living.path.exists()


def test_what_is_not_a_daemons_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_dir, "YOUNG_SECONDS", -1.0)
    with_files = tmp_path / "weft-data"
    with_files.mkdir(mode=0o700)
    (with_files / "results.json").touch()
    open_to_all = tmp_path / "weft-open"
    open_to_all.mkdir(mode=0o755)
    link = tmp_path / "weft-link"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    os.symlink(elsewhere, link)
    empty = tmp_path / "weft-empty"
    empty.mkdir(mode=0o700)
    remove_stale()
    assert [path.exists() for path in (with_files, open_to_all, link, elsewhere, empty)] == [True] * 4 + [False]


def test_a_directory_that_is_about_to_be_locked_stays(tmp_path: Path) -> None:
    new = tmp_path / "weft-new"
    new.mkdir(mode=0o700)
    remove_stale()
    assert new.exists()


def test_a_temporary_folder_too_long_for_sockets_is_said_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR .* is too long for sockets"):
        PrivateDir()
    assert list(long.iterdir()) == []


def test_a_temporary_folder_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        PrivateDir()
