"""`Headstart`: what every engine's start needs and no option changes, done while its options are still being read.

Python imports one module after the other; what else a GPU's start waits for is done in threads beside that.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from weft.engine.config import EngineConfig
from weft.engine.runner.device.compile_job import has_gpu
from weft.kernels.common import warm_start as early

LOOK_SECONDS = 0.1
"""between two looks at whether there is still something to wait for"""


class Headstart:
    """Begins with its creation. Whatever fails here fails again, and is told, where the engine needs it."""

    def __init__(self, modules: Sequence[str], gpu_modules: Sequence[str]) -> None:
        """What to import: in any case, and where there is a GPU."""
        # Nothing of what is imported is garbage: looking for some took a tenth of the time.
        gc.disable()
        imported = modules, gpu_modules
        self._importing = threading.Thread(target=_import, args=imported, name="weft-imports", daemon=True)
        self._importing.start()

    def use(self, config: EngineConfig) -> None:
        """The configuration is known."""
        if config.device != "cpu" and has_gpu():
            early.open_gpu()

    def wait(self, check: Callable[[], None]) -> None:
        """Until everything is imported that can be. check: called meanwhile; what it raises ends the wait."""
        while self._importing.is_alive():
            self._importing.join(LOOK_SECONDS)
            check()
        gc.enable()
        gc.freeze()  # what is there now stays: later collections need not look at it


def _import(modules: Sequence[str], gpu_modules: Sequence[str]) -> None:
    with suppress(Exception):
        if has_gpu():
            early.hash_triton()
        for name in (*modules, *(gpu_modules if has_gpu() else ())):
            import_module(name)
