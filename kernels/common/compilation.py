"""Compiles kernels before they are launched, many at once.

Triton compiles a kernel at its first launch, one at a time. `collect` runs the launching code on the meta device and
records the kernels it would compile; `compile_all` compiles them in separate processes. The results land in Triton's
cache, where the first launch finds them. Neither needs a GPU.
"""

from __future__ import annotations

import gc
import os
import select
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from weft.kernels.common.gpu import Gpu, compiling_for

WARP = 32
GLUE = -1  # Replaces a kernel's index: the launcher code that all kernels share.
_REPORT = struct.Struct("i64s")  # Index of a kernel and its hash, which is empty if it did not compile.


class Kernel(NamedTuple):
    """A kernel with everything that its machine code depends on."""

    function: Any  # The kernel's `JITFunction`.
    arguments: tuple[Any, ...]  # Arguments of `JITFunction._do_compile`: types, constants, options.

    @property
    def key(self) -> tuple[Any, str]:
        """Unique for each kernel."""
        return self.function, self.arguments[0]

    @property
    def name(self) -> str:
        return str(self.function.fn.__qualname__)


class _TargetDriver:
    """Replaces Triton's driver for a GPU that may be absent."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep torch operations on the meta device from importing torch's compiler, which takes as long as torch itself.

    Their functions call that compiler's `disable`; inside this context they call a stub that does nothing."""
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[name], torch._dynamo


def collect(work: Callable[[], None], gpu: Gpu) -> list[Kernel]:
    """Return the kernels that `work` would compile for `gpu`. It launches kernels on meta tensors; nothing is compiled.

    Call it in a process that launches nothing itself, because Triton remembers the target."""
    found: dict[tuple[Any, str], Kernel] = {}
    original = JITFunction._do_compile

    def note(self: Any, key: str, *rest: Any) -> None:
        found.setdefault((self, key), Kernel(self, (key, *rest)))

    driver.set_active(_TargetDriver(gpu))
    JITFunction._do_compile = note
    try:
        with compiling_for(gpu), without_dynamo():
            work()
    finally:
        JITFunction._do_compile = original
    return list(found.values())


def compile_all(
    kernels: Sequence[Kernel], jobs: int, progress: Callable[[int, int], None] | None = None
) -> tuple[list[str], list[Kernel]]:
    """Compile in `jobs` processes forked from this one, which must have no other threads. Call it after `collect`.

    Returns the kernels' hashes in Triton's cache and the kernels that failed. Each process takes the next kernel of the
    queue, slowest first; a process that dies loses only its kernel."""
    kernels = sorted(kernels, key=lambda kernel: not kernel.function.is_gluon())
    tickets, give = os.pipe()
    for i in (GLUE, *range(len(kernels))):
        os.write(give, struct.pack("i", i))
    os.close(give)
    workers = [_Worker(kernels, tickets) for _ in range(min(jobs, len(kernels)))]
    hashes: dict[int, str] = {}
    tried = 0
    while workers:
        ready, _, _ = select.select(workers, (), ())
        for worker in ready:
            if (report := worker.report()) is None:
                workers.remove(worker)
                if not worker.ended_well():  # the compiler aborted: start a new worker for the next kernels
                    workers.append(_Worker(kernels, tickets))
                    tried += 1
                continue
            index, name = report
            if index != GLUE:
                tried += 1
            if name:
                hashes[index] = name
            if progress is not None:
                progress(tried, len(kernels))
    os.close(tickets)
    return list(hashes.values()), [kernel for i, kernel in enumerate(kernels) if i not in hashes]


class _Worker:
    """A forked process that compiles."""

    def __init__(self, kernels: Sequence[Kernel], tickets: int) -> None:
        self._pipe, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                _compile_next(kernels, tickets, theirs)
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)

    def fileno(self) -> int:
        return self._pipe

    def report(self) -> tuple[int, str] | None:
        """Return a finished kernel and its hash (empty if it failed), or None when the process has ended."""
        data = os.read(self._pipe, _REPORT.size)
        if len(data) == _REPORT.size:
            index, name = _REPORT.unpack(data)
            return index, name.rstrip(b"\0").decode()
        return None

    def ended_well(self) -> bool:
        os.close(self._pipe)
        return os.waitpid(self._pid, 0)[1] == 0


def _compile_next(kernels: Sequence[Kernel], tickets: int, reports: int) -> None:
    gc.freeze()  # keeps pages shared with the parent: the collector does not write to these objects
    gc.enable()
    while ticket := os.read(tickets, 4):
        (index,) = struct.unpack("i", ticket)
        name = ""
        try:
            if index == GLUE:
                _link(None)
            else:
                kernel = kernels[index]
                compiled = kernel.function._do_compile(*kernel.arguments)
                name = compiled.hash
                _link(compiled)
        except Exception as error:  # a compiler may raise anything for a tile that does not fit
            print(f"{kernels[index].name}: {error}", file=sys.stderr)
        os.write(reports, _REPORT.pack(index, name.encode()))


def _link(compiled: Any) -> None:
    """Build the launcher of one kernel, or with None the code that all launchers share."""
    # Without a driver library there is nothing to link to (AssertionError). Triton 3.7 has one launcher for all
    # kernels.
    with suppress(AssertionError, AttributeError):
        if compiled is None:
            nvidia.CudaUtils()
        else:
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
