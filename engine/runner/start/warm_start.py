"""`WarmStart`: imports modules and prepares the GPU while the engine's options are still being read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from weft.engine.config import EngineConfig
from weft.engine.runner.device.compile_job import has_gpu
from weft.kernels.common import warm_start as warm_start

POLL_SECONDS = 0.1  # Seconds between checks whether the imports have ended.


class WarmStart:
    """Starts when created. Errors are ignored here, because they occur again where the engine needs the module."""

    def __init__(self, modules: Sequence[str], gpu_modules: Sequence[str]) -> None:
        """modules: imported always. gpu_modules: imported if there is a GPU."""
        # Imports create no garbage, and collections took a tenth of the time.
        gc.disable()
        imported = modules, gpu_modules
        self._importing = threading.Thread(target=_import, args=imported, name="weft-imports", daemon=True)
        self._importing.start()

    def use(self, config: EngineConfig) -> None:
        """Open the GPU if the configuration uses it."""
        if config.device != "cpu" and has_gpu():
            warm_start.open_gpu()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for the imports. check: called meanwhile; an error that it raises ends the wait."""
        while self._importing.is_alive():
            self._importing.join(POLL_SECONDS)
            check()
        gc.enable()
        gc.freeze()  # later collections skip everything imported


def _import(modules: Sequence[str], gpu_modules: Sequence[str]) -> None:
    with suppress(Exception):
        if has_gpu():
            warm_start.hash_triton()
        for name in (*modules, *(gpu_modules if has_gpu() else ())):
            import_module(name)
