"""`library`: compiles the C++ of this folder once per machine, and loads it once per process.

The compiled file is kept in a cache folder. Its name holds the CPU's instructions and a digest of sources, flags,
compiler and C library, so different machines may share a home folder. The file is loaded only if this user or root owns
it, nobody else may write it, and its checksum is right. Without a library, callers use torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("vectors.h", "threads.h", "products.h", "attention.h", "layers.h", "weft.cpp")
ABI = 2  # of weft.cpp
VARIANTS = (
    (
        "avx512vnni",
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"},
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
    ),
    ("avx2", {"avx2", "fma", "f16c"}, ("-mavx2", "-mfma", "-mf16c")),
)
"""Name, required CPU flags and compiler flags, best first."""
FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-fno-exceptions", "-w",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS, VERSION_SECONDS, LOCK_SECONDS = 180.0, 20.0, 200.0
CHECKSUM_BYTES = 32

_guard = threading.Lock()
_opened = itertools.count()  # Makes each path unique: the loader takes equal paths for the same file.
_loaded: ctypes.CDLL | None = None
_reason: str | None = "not started"  # Why no library is loaded.


class NoLibrary(Exception):
    """No library can be compiled or loaded; the text says why."""


def loaded() -> ctypes.CDLL | None:
    """Return the library; None: use torch."""
    return _loaded


def reason() -> str | None:
    """Return why no library is loaded; None if one is."""
    return _reason


def discard(why: str) -> None:
    """Stop using the library."""
    global _loaded, _reason
    _loaded, _reason = None, why


def load(cache: Path) -> ctypes.CDLL | None:
    """Load the library, at the first call; later calls return the same result. cache: weft's cache folder."""
    global _loaded, _reason
    with _guard:
        if _reason == "not started":
            try:
                _loaded = _find(cache)
                _reason = None
            except (NoLibrary, OSError) as error:
                _reason = str(error)
        return _loaded


def cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU by Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def variants(flags: set[str]) -> list[str]:
    """Return the names of variants that a CPU with these flags can run, best first."""
    return [name for name, needed, _ in VARIANTS if needed <= flags]


def _find(cache: Path) -> ctypes.CDLL:
    names = variants(cpu_flags())
    if not names:
        raise NoLibrary("the CPU lacks AVX2")
    return open_variant(names[0], cache)


def open_variant(variant: str, cache: Path) -> ctypes.CDLL:
    """Load one variant, compiled if need be. Raises `NoLibrary`."""
    compiler = find_compiler()
    name = f"{variant}-{_digest(variant, compiler)}.so"
    try:
        folder = _own_folder(cache / "native")
        with _locked(folder / "lock"):
            if (found := _open(folder / name)) is None:
                return _compiled(compiler, variant, folder / name)
            return found
    except OSError:  # a cache that cannot be written or trusted
        return _compile_privately(compiler, variant)


def _compile_privately(compiler: str, variant: str) -> ctypes.CDLL:
    """Compile into a folder that is removed once the library is loaded."""
    try:
        with tempfile.TemporaryDirectory(prefix="weft-native-") as folder:
            return _compiled(compiler, variant, Path(folder) / f"{variant}.so")
    except OSError as error:
        raise NoLibrary(f"cannot compile: {error}") from None


def _compiled(compiler: str, variant: str, path: Path) -> ctypes.CDLL:
    _compile(compiler, variant, path)
    if (found := _open(path)) is None:
        path.unlink()
        raise NoLibrary(f"what {compiler} compiled cannot be loaded")
    return found


def find_compiler() -> str:
    """Return the path of a C++ compiler: `$CXX`, else the first known one. Raises `NoLibrary`."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise NoLibrary("no C++ compiler: install g++ or clang++, or set CXX")


def usable() -> bool:
    """Return whether this machine can run the library and compile it, without doing either."""
    with suppress(NoLibrary):
        return bool(variants(cpu_flags()) and find_compiler())
    return False


def sources() -> str:
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)


def _digest(variant: str, compiler: str) -> str:
    version = _run([compiler, "--version"], VERSION_SECONDS)
    parts = (sources(), *FLAGS, *_flags(variant), compiler, version, *platform.libc_ver(), platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _flags(variant: str) -> tuple[str, ...]:
    return next(flags for name, _, flags in VARIANTS if name == variant)


def _run(command: list[str], seconds: float) -> str:
    """Return what a command prints. Raises `NoLibrary` if it fails or takes too long; its children are killed too."""
    environment = {**os.environ, "LC_ALL": "C"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{command[0]} did not end within {seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.decode(errors="replace").strip()
    if process.returncode:
        raise NoLibrary(f"{command[0]} failed: {(text.splitlines() or [f'status {process.returncode}'])[0]}")
    return text


def _own_folder(folder: Path) -> Path:
    """Make a folder for this user. Raises `OSError` if others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(os.lstat(folder), stat.S_ISDIR)
    return folder


def _check(found: os.stat_result, kind: object) -> None:
    """Raise `PermissionError` unless this user or root owns a file and no other user may write it."""
    right = callable(kind) and kind(found.st_mode)
    if not right or found.st_uid not in {os.geteuid(), 0} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("not safe to load code from")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for. Raises `OSError` if it stays taken or cannot be had."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _compile(compiler: str, variant: str, path: Path) -> None:
    """Compile a variant. `path` appears at once and whole, with a checksum after its end."""
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, *_flags(variant), str(FOLDER / SOURCES[-1]), "-o", made]
        _run(command, COMPILE_SECONDS)
        data = Path(made).read_bytes()
        with open(made, "ab") as file:
            file.write(hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(made, 0o700)
        os.rename(made, path)
    finally:
        Path(made).unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL | None:
    """Load a compiled file; None if it is missing or damaged. Raises `PermissionError` if it is not safe to load."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        _check(os.fstat(descriptor), stat.S_ISREG)
        data = file.read()
        if hashlib.sha256(data[:-CHECKSUM_BYTES]).digest() != data[-CHECKSUM_BYTES:]:
            return None
        try:  # by descriptor, so that what was checked is what is loaded
            library = ctypes.CDLL(f"/proc/self/fd/{'./' * next(_opened)}{descriptor}")
            if library.weft_abi() != ABI:
                return None
        except (OSError, AttributeError):
            return None
    library.weft_use_team(_team())
    return library


@functools.cache
def _team() -> ctypes.c_void_p:
    """Return the function of torch's OpenMP library that runs a team of threads; null without one."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ctypes.c_void_p()
    for path in sorted({line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return ctypes.c_void_p()
