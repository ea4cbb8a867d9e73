"""`download`: fetches files of a Hugging Face repository into the hub's cache and shows progress."""

from __future__ import annotations

import glob
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.engine.errors import ConfigError, ModelError
from weft.engine.progress import notice

PARTIAL = ".incomplete"  # Suffix of incomplete files; the hub's library never resumes one of an earlier process.
OLD_SECONDS = 3600.0  # Age in seconds at which an incomplete file is abandoned.
LINE_SECONDS = 5.0  # Seconds between progress lines in a log.
GIB = 2**30


def cache_dir() -> Path:
    """Return the hub's cache: HF_HUB_CACHE, or below HF_HOME. Raises `ConfigError` if the user has no home."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_HUB_CACHE).expanduser()
    except RuntimeError:
        raise ConfigError(f"user {os.getuid()} has no home directory: set HOME or HF_HOME") from None


def repository(name: str) -> Path:
    """Return the cache folder of ORG/NAME, which may not exist."""
    return cache_dir() / f"models--{name.replace('/', '--')}"


def download(name: str, revision: str | None, wanted: list[str], left: dict[str, int]) -> Path:
    """Download the files `wanted` and return the snapshot. left: bytes of the files not in the cache yet."""
    from huggingface_hub import snapshot_download

    snapshots: list[str] = []
    blobs = repository(name) / "blobs"
    if left:
        _remove_partial(blobs)
        _check_disk_space(name, sum(left.values()))
        patterns = [glob.escape(file) for file in wanted]
        with _ProgressDisplay(name, blobs, len(left), sum(left.values())):
            _in_background(
                lambda: snapshots.append(snapshot_download(name, revision=revision, allow_patterns=patterns))
            )
    return Path(*snapshots)


def _remove_partial(blobs: Path) -> None:
    """Remove incomplete files of abandoned downloads."""
    for file in blobs.glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > OLD_SECONDS:
                file.unlink()


def _check_disk_space(name: str, size: int) -> None:
    """Raise `ModelError` if the cache's disk is too small."""
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(
            f"{name} needs {size / GIB:.1f} GiB, {cache_dir()} has {free / GIB:.1f} GiB free: "
            "free some space, or set HF_HOME to a larger disk"
        )


def _in_background(work: Any) -> None:
    """Run `work` on a thread, so that Ctrl-C returns at once; the hub's own threads would first finish their files."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="weft-pull", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        notice("stopped; complete files are kept: run the command again to resume")
        raise
    if failed:
        raise failed[0]


class _ProgressDisplay:
    """Shows download progress: a bar on a terminal, occasional lines in a log.

    It looks at file sizes, so it works with any transfer method."""

    def __init__(self, name: str, folder: Path, files: int, size: int) -> None:
        self._name, self._folder, self._size = name, folder, size
        self._before = {file.name for file in self._files() if file.suffix != PARTIAL}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-pull-watch", daemon=True)
        notice(f"downloading {name}: {files} {'file' if files == 1 else 'files'}, {amount(size)}, to {cache_dir()}")

    def __enter__(self) -> None:
        self._begun, self._first = time.monotonic(), self._there()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _files(self) -> Sequence[Path]:
        try:
            return list(self._folder.iterdir())
        except OSError:
            return []

    def _there(self) -> int:
        size = 0
        for file in self._files():
            if file.name not in self._before:
                try:
                    about = file.stat()
                except OSError:  # just renamed
                    continue
                # A file may have its full length before its data arrives.
                size += min(about.st_size, about.st_blocks * 512)
        return min(size, self._size)

    def _run(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            self._bar(console)
            return
        while not self._ended.wait(LINE_SECONDS):
            there = self._there()
            speed = (there - self._first) / (time.monotonic() - self._begun)
            left = f", {(self._size - there) / speed:,.0f} s left" if speed > 0 else ""
            share = f"{there / max(1, self._size):.0%}"
            notice(f"downloading {self._name}: {amount(there)} of {amount(self._size)}, {share}{left}")

    def _bar(self, console: Any) -> None:
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(), progress.TimeRemainingColumn(),
        )  # fmt: skip
        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(self._name, total=self._size, completed=self._first)
            while not self._ended.wait(0.2):
                bar.update(task, completed=self._there())


def amount(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
