"""Output of commands: the progress of a start (loading, compiling, capturing), and results (`for_stdout`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

REPORT_SECONDS = 2.0
LOADING = "loading weights"  # the phase that counts bytes
GIB = 2**30
UNLIMITED_WIDTH = 10_000  # columns of output that is not a terminal


def for_stdout() -> Console:
    """Return the console for a command's result. Output is wrapped only on a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else UNLIMITED_WIDTH)


def notice(text: str) -> None:
    """Print a line of a start to stderr."""
    print(f"weft: {text}", file=sys.stderr, flush=True)


def progress_text(phase: str, done: int, total: int, seconds: float = 0.0) -> str:
    """Describe the progress of a phase, with a rate for bytes if `seconds` have passed."""
    if phase != LOADING:
        return f"{phase}, {done} of {total}"
    size, unit = (GIB, "GiB") if total >= GIB else (1 << 20, "MiB")
    rate = f" at {done / size / seconds:.1f} {unit}/s" if seconds > 0 and done else ""
    return f"{phase}, {done / size:.1f} of {total / size:.1f} {unit}{rate}"


class Progress(Protocol):
    """Called at the start of a phase (`done` is 0) and when some of its `total` parts are done."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


class Phases:
    """Forwards reports and measures each phase, from its first report to that of the next phase, or `end`."""

    def __init__(self, to: Progress | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._to, self._clock = to, clock
        self._phase: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.end()
            self._phase = phase
        if self._to is not None:
            self._to(phase, done, total)

    def end(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = None, now


class ProgressLines:
    """Logs the progress of a start to stderr every two seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = self._begun = clock()
        self._phase: str | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        if phase != self._phase:
            self._phase, self._begun = phase, now
        if now - self._logged < REPORT_SECONDS:
            return
        self._logged = now
        left = ""
        if 0 < done < total:
            left = f", about {max(1, round((now - self._begun) / done * (total - done)))} s left"
        notice(f"{progress_text(phase, done, total, now - self._begun)}{left}")


class ProgressBar:
    """A progress bar on stderr while the block runs, if stderr is a terminal."""

    def __init__(self, *, enabled: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        shown = enabled and (console.is_terminal or console.is_jupyter)
        self._bar = Progress(*columns, console=console, transient=True, disable=not shown)
        self._phase: str | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._bar.start()
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task, self._phase, self._begun = self._bar.add_task(phase, total=total), phase, time.monotonic()
        text = progress_text(phase, done, total, time.monotonic() - self._begun)
        self._bar.update(self._task, completed=done, total=total, description=text)
