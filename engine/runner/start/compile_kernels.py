"""Compiles an engine's kernels in one process per core: `python -m …compile_kernels`, started by `CompileJob`.

Reads an `EngineConfig` as one line of JSON from stdin and writes `DONE TOTAL` lines to stdout. If the engine does not
wait for its plan, it also writes `serial` once the serial plan is compiled, and `pipeline I` with the names of kernels
that did not compile. Invalid models and options are left for the engine to report.
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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.runner.device.compile_job import PIPELINE, SERIAL, is_compiled, stamp_file, use_cache, write_stamp
from weft.engine.wire.child import pin_to
from weft.engine.wire.cores import cores
from weft.kernels.common import warm_start as warm_start
from weft.kernels.common.gpu import Gpu, gpu

if TYPE_CHECKING:
    from weft.kernels.common.compilation import Kernel

NICENESS = 10  # Niceness while an engine serves.
IMPORTED = (
    "weft.engine.runner.start.kernel_set",
    "weft.kernels.common.compilation",
    "torch.fx.experimental.symbolic_shapes",  # which operations on the meta device import
)
WAIT_SECONDS = 1.0  # Seconds between attempts to lock while another process compiles the same kernels.


def compile_kernels(
    config: EngineConfig, target: Gpu, jobs: int, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[Kernel]]:
    """Compile all kernels of the configuration for `target`. Returns their number, and those that did not compile.

    Raises `WeftError` for a model or options that cannot be served there."""
    from weft.engine.runner.start.kernel_set import kernel_set
    from weft.kernels.common.compilation import compile_all

    use_cache(config)
    stamp = stamp_file(config)  # taken before tiles change
    hashing = warm_start.hash_triton()
    kernels = kernel_set(config, target)
    hashing.join()  # forked processes inherit the hashes, and no thread may run during a fork
    hashes, failed = compile_all(kernels, jobs, progress)
    if not failed:
        write_stamp(stamp, target.name, _folders(hashes))
    return len(kernels), failed


def compile_in_parts(config: EngineConfig, target: Gpu, jobs: int, report: Callable[[str], None]) -> None:
    """Compile the serial plan, then each pipeline. report: receives the lines for a `CompileJob`."""
    from weft.engine.runner.start.kernel_set import kernel_parts
    from weft.kernels.common.compilation import compile_all

    use_cache(config)
    stamp, serial_stamp = stamp_file(config), stamp_file(config, SERIAL)
    hashing = warm_start.hash_triton()
    parts = kernel_parts(config, target)
    hashing.join()
    seen: set[object] = set()
    missing: dict[object, str] = {}  # Names of kernels that did not compile.
    folders: set[str] = set()

    def compile_part(part: Sequence[Kernel]) -> list[str]:
        """Return the names of those that did not compile, now or earlier."""
        new = [kernel for kernel in part if kernel.key not in seen]
        seen.update(kernel.key for kernel in new)
        hashes, failed = compile_all(new, jobs, lambda done, total: report(f"{done} {total}")) if new else ([], [])
        missing.update((kernel.key, kernel.name) for kernel in failed)
        folders.update(_folders(hashes))
        return sorted({missing[kernel.key] for kernel in part if kernel.key in missing})

    for i, part in enumerate(parts, -1):
        failed = compile_part(part)
        if i < 0:
            if not failed:
                write_stamp(serial_stamp, target.name, sorted(folders))
            report(SERIAL)
            os.nice(NICENESS)
        else:
            report(f"{PIPELINE} {i} {', '.join(failed)}".rstrip())
    if parts and not missing:
        write_stamp(stamp, target.name, sorted(folders))


@contextlib.contextmanager
def one_at_a_time(config: EngineConfig, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock for this configuration, so that engines that start together do not all compile the same kernels.

    waiting: called repeatedly while another process holds the lock. Without a writable folder there is no lock."""
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
        yield  # closing the file releases the lock


def _folders(hashes: Sequence[str]) -> list[str]:
    """Return the folder names in the cache of kernels with these hashes."""
    from triton.runtime.cache import get_cache_manager

    return sorted(Path(get_cache_manager(h).cache_dir).name for h in hashes)


def _import_all() -> None:
    """Import what every job needs. A missing module is reported by the job itself."""
    with contextlib.suppress(ImportError):
        hashing = warm_start.hash_triton()
        for name in IMPORTED:
            import_module(name)
        hashing.join()


def main() -> int:
    gc.disable()  # imports and collected kernels create no garbage
    _import_all()  # the process may have been started before its configuration is known
    if not (line := sys.stdin.readline()):
        return 0  # nobody needs the job
    config = EngineConfig.model_validate_json(line)
    pin_to(config.share.cpus)
    if (target := gpu()) is None:
        return 0
    use_cache(config)

    def waiting() -> None:
        print(0, 1, flush=True)  # a sign of life
        if not config.wait_for_plan and is_compiled(config, SERIAL):
            print(SERIAL, flush=True)

    try:
        with one_at_a_time(config, waiting):
            if not config.wait_for_plan:
                compile_in_parts(config, target, cores(), lambda line: print(line, flush=True))
            elif not is_compiled(config):  # another process may have done it
                compile_kernels(config, target, cores(), lambda done, total: print(done, total, flush=True))
    except WeftError:
        return 1
    except BrokenPipeError:  # the engine has ended: end the compiling processes too
        os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
