"""Compiles what an engine will launch, in as many processes as there are cores: `python -m …compile_kernels`.

Takes an `EngineConfig` as one line of JSON on stdin, writes `DONE TOTAL` lines on stdout. Where the engine does not
wait for its plan, also `serial` once that plan's kernels are there, and `pipeline I` with the names of those that did
not compile, if any. Started by a `CompileJob`; a model or option that cannot work is left for the engine to refuse.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.runner.device.compile_job import PIPELINE, SERIAL, is_compiled, stamp_file, use_cache, write_stamp
from weft.engine.wire.cores import cores
from weft.kernels.common import warm_start as early
from weft.kernels.common.gpu import Gpu, gpu

if TYPE_CHECKING:
    from weft.kernels.common.compilation import Kernel

NICENESS = 10
"""of compiling beside an engine that serves"""
WAIT_SECONDS = 1.0
"""between looks at another process that compiles the same"""


def compile_kernels(
    config: EngineConfig, target: Gpu, jobs: int, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[Kernel]]:
    """How many kernels the configuration needs on `target`, now in the cache, and those that did not compile.

    Raises `WeftError` for a model or options that cannot be served there.
    """
    from weft.engine.runner.start.kernel_set import kernel_set
    from weft.kernels.common.compilation import compile_all

    use_cache(config)
    stamp = stamp_file(config)  # of the tiles that are known now
    hashing = early.hash_triton()
    kernels = kernel_set(config, target)
    hashing.join()  # what is known here the processes need not find out, and no thread may run when they are forked
    hashes, failed = compile_all(kernels, jobs, progress)
    if not failed:
        write_stamp(stamp, target.name, _folders(hashes))
    return len(kernels), failed


def compile_in_parts(config: EngineConfig, target: Gpu, jobs: int, tell: Callable[[str], None]) -> None:
    """As `compile_kernels`, the serial plan first; `tell` gets the lines for a `CompileJob`."""
    from weft.engine.runner.start.kernel_set import kernel_parts
    from weft.kernels.common.compilation import compile_all

    use_cache(config)
    stamp, serial_stamp = stamp_file(config), stamp_file(config, SERIAL)
    hashing = early.hash_triton()
    parts = kernel_parts(config, target)
    hashing.join()
    seen: set[object] = set()
    missing: dict[object, str] = {}
    """names of kernels that did not compile"""
    folders: set[str] = set()

    def compile_part(part: Sequence[Kernel]) -> list[str]:
        """Returns the names of those that did not compile, now or before."""
        new = [kernel for kernel in part if kernel.key not in seen]
        seen.update(kernel.key for kernel in new)
        hashes, failed = compile_all(new, jobs, lambda done, total: tell(f"{done} {total}")) if new else ([], [])
        missing.update((kernel.key, kernel.name) for kernel in failed)
        folders.update(_folders(hashes))
        return sorted({missing[kernel.key] for kernel in part if kernel.key in missing})

    for i, part in enumerate(parts, -1):
        failed = compile_part(part)
        if i < 0:
            if not failed:
                write_stamp(serial_stamp, target.name, sorted(folders))
            tell(SERIAL)
            os.nice(NICENESS)
        else:
            tell(f"{PIPELINE} {i} {', '.join(failed)}".rstrip())
    if parts and not missing:
        write_stamp(stamp, target.name, sorted(folders))


@contextlib.contextmanager
def one_at_a_time(config: EngineConfig, waiting: Callable[[], None]) -> Iterator[None]:
    """Of the processes that compile for such a configuration: engines that start together need the same kernels, and
    each would compile them all. waiting: called again and again until then.

    A process that ends lets the next one in. Where the folder cannot be written nobody waits.
    """
    place = int(stamp_file(config).stem[-7:], 16)
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
        file = (config.cache_path / "kernels.lock").open("w")
    except OSError:
        yield
        return
    with file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except BlockingIOError:
                waiting()
                time.sleep(WAIT_SECONDS)
        yield  # closing the file gives the place back


def _folders(hashes: Sequence[str]) -> list[str]:
    """Names in the cache of the kernels with these hashes."""
    from triton.runtime.cache import get_cache_manager

    return sorted(Path(get_cache_manager(h).cache_dir).name for h in hashes)


def main() -> int:
    gc.disable()  # nothing of what is imported and collected is garbage
    config = EngineConfig.model_validate_json(sys.stdin.readline())
    if (target := gpu()) is None:
        return 0
    use_cache(config)

    def waiting() -> None:
        print(0, 1, flush=True)  # that there is life here
        if not config.wait_for_plan and is_compiled(config, SERIAL):
            print(SERIAL, flush=True)

    try:
        with one_at_a_time(config, waiting):
            if not config.wait_for_plan:
                compile_in_parts(config, target, cores(), lambda line: print(line, flush=True))
            elif not is_compiled(config):  # it was not when this process began
                compile_kernels(config, target, cores(), lambda done, total: print(done, total, flush=True))
    except WeftError:
        return 1
    except BrokenPipeError:  # the engine has gone, so nobody waits for the processes that compile
        os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
