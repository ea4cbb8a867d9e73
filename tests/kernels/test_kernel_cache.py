"""Compiled kernels on a disk that cannot be written: they are read from it, and new ones are kept elsewhere."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.cache import get_cache_manager

from weft.kernels.common import kernel_cache
from weft.kernels.common.kernel_cache import KernelCache

STORED, NEW = "ab" * 16, "cd" * 16


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_kernels_are_kept_elsewhere_while_the_folder_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "manager_class", KernelCache)
    stored = get_cache_manager(STORED).put(b"old", "kernel")
    makedirs = os.makedirs

    def refuse(path: str, *arguments: int, **others: bool) -> None:
        if str(path).startswith(str(tmp_path)) and not os.path.isdir(path):
            raise OSError(error, os.strerror(error))
        makedirs(path, *arguments, **others)

    monkeypatch.setattr(os, "makedirs", refuse)
    assert get_cache_manager(STORED).get_file("kernel") == stored
    for key in (STORED, NEW):  # a known folder, and one that cannot be made
        manager = get_cache_manager(key)
        group = manager.put_group("group", {"part": manager.put(b"made", "part")})
        assert not group.startswith(str(tmp_path))
        found = manager.get_group("group")
        assert found is not None
        assert Path(found["part"]).read_bytes() == b"made"
    monkeypatch.setattr(os, "makedirs", makedirs)
    assert get_cache_manager(NEW).put(b"made", "part").startswith(str(tmp_path))


def test_the_own_folder_ends_with_its_process() -> None:
    script = f"from {kernel_cache.__name__} import _own_folder; print(_own_folder())"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert not Path(done.stdout.strip()).exists()
