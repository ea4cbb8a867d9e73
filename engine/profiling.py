"""`Profiling`: runs torch's profiler over the engine process for some seconds."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler


class Profiling:
    """Records from its creation on. Starting and ending it pause the engine for a moment."""

    def __init__(self, path: Path, seconds: float) -> None:
        """`path` is where the Chrome trace appears once it is complete."""
        self._path = path
        self._until = time.monotonic() + seconds
        # Not torch.profiler, which imports the compiler and takes seconds. Runner threads that exist must be included.
        self._profile = profiler.profile(
            use_device="cuda" if torch.cuda.is_available() else None,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.__enter__()

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        """Write the trace. Raises `OSError` if it cannot be written."""
        self._profile.__exit__(None, None, None)
        part = self._path.with_suffix(".part")
        self._profile.export_chrome_trace(str(part))
        part.rename(self._path)
