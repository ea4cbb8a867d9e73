"""The compiled library: kept in a cache that others cannot write to, and never a reason not to start."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weft.kernels.native import library

BEST = next(iter(library.variants(library.cpu_flags())), "")
pytestmark = pytest.mark.skipif(not BEST or shutil.which("c++") is None, reason="needs AVX2 and a C++ compiler")


@pytest.fixture
def compiled(tmp_path: Path, short: None) -> Path:  # noqa: ARG001
    """Return a cache with a compiled library."""
    library.open_variant(BEST, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile a short source, in no time."""
    source = tmp_path / "short.cpp"
    source.write_text(
        f'extern "C" int weft_abi() {{ return {library.ABI}; }}\nextern "C" void weft_use_team(void *) {{}}\n'.replace(
            'extern "C"', 'extern "C" __attribute__((visibility("default")))'
        )
    )
    monkeypatch.setattr(library, "SOURCES", (str(source),))


def files(cache: Path) -> list[Path]:
    return sorted((cache / "native").glob("*.so"))


def compiler(folder: Path, script: str) -> str:
    """Write a compiler that answers `--version` and then runs a script."""
    path = folder / "fake-c++"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1 && exit 0\n{script}\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_second_start_compiles_nothing(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert isinstance(library.open_variant(BEST, compiled), ctypes.CDLL)
    (file,) = files(compiled)
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_another_source_compiler_or_variant_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = library._digest(BEST, "c++")
    monkeypatch.setattr(library, "sources", lambda: "changed")
    assert library._digest(BEST, "c++") != own
    monkeypatch.undo()
    assert library._digest(BEST, compiler(tmp_path, "exit 1")) != own
    assert len({library._digest(name, "c++") for name, _, _ in library.VARIANTS}) == len(library.VARIANTS)


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_file_is_compiled_again(compiled: Path, damage: bytes | None) -> None:
    (file,) = files(compiled)
    whole = file.read_bytes()
    os.replace(shutil.copy(file, f"{file}.copy"), file)  # the one in use keeps its bytes
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert library.open_variant(BEST, compiled).weft_abi() == library.ABI
    assert library._open(file) is not None


def test_a_file_that_others_may_write_is_not_loaded(compiled: Path) -> None:
    (file,) = files(compiled)
    file.chmod(0o722)
    with pytest.raises(PermissionError):
        library._open(file)
    assert library.open_variant(BEST, compiled).weft_abi() == library.ABI  # from a folder of its own
    assert stat.S_IMODE(file.stat().st_mode) == 0o722


def test_a_link_is_not_followed(compiled: Path, tmp_path: Path) -> None:
    (file,) = files(compiled)
    file.rename(tmp_path / "elsewhere.so")
    file.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(OSError, match="symbolic links"):
        library._open(file)
    assert library.open_variant(BEST, compiled).weft_abi() == library.ABI


@pytest.mark.parametrize("kind", ["open to all", "link", "file"])
def test_a_folder_that_cannot_be_trusted_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "native"
    if kind == "file":
        folder.write_text("")
    else:
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other") if kind == "link" else folder.mkdir()
        if kind != "link":
            folder.chmod(0o777)
    assert library.open_variant(BEST, tmp_path).weft_abi() == library.ABI
    assert not list(tmp_path.rglob("*.so"))


def test_another_users_file_is_not_loaded(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root may own what a user loads, but not the other way round
        (file,) = files(compiled)
        assert library._open(file) is not None
        os.chown(file, 12345, -1)
        monkeypatch.undo()
    with pytest.raises(PermissionError):
        library._open(files(compiled)[0])


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path, *given: int, **others: bool) -> None:
        if path.is_relative_to(tmp_path / "cache"):
            raise OSError(30, "Read-only file system")
        mkdir(path, *given, **others)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert library.open_variant(BEST, tmp_path / "cache").weft_abi() == library.ABI


@pytest.mark.parametrize(
    ("script", "text"),
    [("echo no memory >&2; exit 3", "failed: no memory"), ("exit 0", "cannot be loaded"), ("sleep 60", "did not end")],
)
def test_a_compiler_that_fails_is_a_reason_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, text: str
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    monkeypatch.setattr(library, "COMPILE_SECONDS", 1.0 if "sleep" in script else 60.0)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_reason", "not started")
    assert library.load(tmp_path) is None
    assert text in (library.reason() or "")
    assert library.load(tmp_path) is None
    assert not list((tmp_path / "native").glob("*.so"))


def test_no_compiler_and_an_old_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda _: None)
    with pytest.raises(library.NoLibrary, match="install g"):
        library.open_variant(BEST, tmp_path)
    monkeypatch.setattr(library, "cpu_flags", lambda: {"sse2"})
    with pytest.raises(library.NoLibrary, match="AVX2"):
        library._find(tmp_path)
    assert library.variants({"avx2", "fma", "f16c"}) == ["avx2"]


def test_a_lock_that_is_never_released_does_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LOCK_SECONDS", 0.1)
    folder = library._own_folder(tmp_path / "native")
    with library._locked(folder / "lock"):
        assert library.open_variant(BEST, tmp_path).weft_abi() == library.ABI
    assert not files(tmp_path)


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'echo compiled >> {log}\nexec c++ "$@"'
    code = (
        "import sys; from pathlib import Path; from weft.kernels.native import library\n"
        "assert library.load(Path(sys.argv[1])) is not None, library.reason()"
    )
    environment = {**os.environ, "CXX": compiler(tmp_path, script)}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "cache")], env=environment) for _ in range(3)
    ]
    assert [process.wait(300) for process in started] == [0, 0, 0]
    assert log.read_text(encoding="utf-8").split() == ["compiled"]
    assert len(files(tmp_path / "cache")) == 1
