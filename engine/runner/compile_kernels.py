"""Compiles what an engine will launch, in as many processes as there are cores: `python -m …compile_kernels`.

Takes an `EngineConfig` as one line of JSON on stdin, writes `DONE TOTAL` lines on stdout. Started by a `CompileJob`; a
model or option that cannot work is left for the engine to refuse.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.runner.compile_job import cores, stamp_file, use_cache, write_stamp
from weft.kernels import early
from weft.kernels.gpu import Gpu, gpu

if TYPE_CHECKING:
    from weft.kernels.compilation import Kernel


def compile_kernels(
    config: EngineConfig, target: Gpu, jobs: int, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[Kernel]]:
    """How many kernels the configuration needs on `target`, now in the cache, and those that did not compile.

    Raises `WeftError` for a model or options that cannot be served there.
    """
    from weft.engine.runner.kernel_set import kernel_set
    from weft.kernels.compilation import compile_all

    use_cache(config)
    stamp = stamp_file(config)  # of the tiles that are known now
    hashing = early.hash_triton()
    kernels = kernel_set(config, target)
    hashing.join()  # what is known here the processes need not find out, and no thread may run when they are forked
    hashes, failed = compile_all(kernels, jobs, progress)
    if not failed:
        from triton.runtime.cache import get_cache_manager

        write_stamp(stamp, target.name, sorted(Path(get_cache_manager(h).cache_dir).name for h in hashes))
    return len(kernels), failed


def main() -> int:
    gc.disable()  # nothing of what is imported and collected is garbage
    config = EngineConfig.model_validate_json(sys.stdin.readline())
    if (target := gpu()) is None:
        return 0
    try:
        compile_kernels(config, target, cores(), lambda done, total: print(done, total, flush=True))
    except WeftError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
