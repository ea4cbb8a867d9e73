"""`Profiling`: torch's profiler over the engine process for some seconds."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler


class Profiling:
    """Records from its making on. Starting it and ending it hold the engine up for a moment."""

    def __init__(self, path: Path, seconds: float) -> None:
        """`path`: of the Chrome trace; it is there once it is whole."""
        self._path = path
        self._until = time.monotonic() + seconds
        # Not torch.profiler, whose start imports the compiler: seconds for nothing. A runner's thread was there before.
        self._profile = profiler.profile(
            use_device="cuda" if torch.cuda.is_available() else None,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.__enter__()

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        """Write the trace. Raises `OSError` when that is not possible."""
        self._profile.__exit__(None, None, None)
        part = self._path.with_suffix(".part")
        self._profile.export_chrome_trace(str(part))
        part.rename(self._path)
