"""`SearchBar`: the progress of a search or sweep on stderr, and its early end by signal."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

LINE_SECONDS = 5.0  # Minimum seconds between two log lines.


class SearchBar:
    """Shows a bar on a terminal, or prints a line every few seconds otherwise, while the block runs.

    The first Ctrl-C or SIGTERM sets `stop_requested`, so that the search returns its best result so far. The second one
    ends the process as usual."""

    def __init__(self, budget_s: float, command: str = "weft search") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.stop_requested = False
        self._command = command
        self._budget_s = budget_s
        self._begun = time.monotonic()
        self._said = self._begun - LINE_SECONDS
        self._share = 0.0
        console = Console(stderr=True)
        self._terminal = console.is_terminal
        columns = (BarColumn(24), TaskProgressColumn(), TextColumn("{task.fields[left]}  {task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._task = self._bar.add_task("reading the model", total=1.0, left="")
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> SearchBar:
        self._bar.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread, which alone receives signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._bar.stop()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True
        self._restore()
        print(
            f"{self._command}: ending with the best result so far; press Ctrl-C again to quit now",
            file=sys.stderr,
            flush=True,
        )

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show the current step and, if known, the completed share of the search."""
        if share is not None:
            self._share = max(self._share, min(share, 0.99))
        if self._terminal:
            self._bar.update(self._task, description=text, completed=self._share, left=self._left()[2:])
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(f"{self._command}: {self._share:.0%}{self._left()}: {text}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Estimate the remaining time. It is at most the remaining budget."""
        elapsed = time.monotonic() - self._begun
        left = max(0.0, self._budget_s - elapsed)
        if self._share > 0.02:
            left = min(left, elapsed / self._share * (1 - self._share))
        return f", {left:.0f} s left"
