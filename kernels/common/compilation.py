"""Kernels compiled apart from being launched: which ones some work needs, and many of them at once.

Triton compiles a kernel when it is first launched, one after the other. `collect` runs the launching code on the meta
device and notes what it would compile; `compile_all` does that in processes of its own and leaves the results in
Triton's cache, where the first launch finds them. Neither needs a GPU.
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
GLUE = -1
"""in place of a kernel's index: what launches of all kernels need"""
_REPORT = struct.Struct("i64s")
"""index of a kernel, its hash; empty if it did not compile"""


class Kernel(NamedTuple):
    """A kernel with everything that its machine code depends on."""

    function: Any
    """its `JITFunction`"""
    arguments: tuple[Any, ...]
    """of `JITFunction._do_compile`: types, constants, options"""

    @property
    def key(self) -> tuple[Any, str]:
        """What is the same in no two kernels."""
        return self.function, self.arguments[0]

    @property
    def name(self) -> str:
        return str(self.function.fn.__qualname__)


class _Absent:
    """Stands for Triton's driver of a GPU that need not be there."""

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
def _without_dynamo() -> Iterator[None]:
    """Inside, what torch does on the meta device does not import torch's compiler, which takes as long as torch itself.

    Its functions ask that compiler to leave them alone; here something that leaves everything alone is asked.
    """
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
    """What `work` would compile for `gpu`: it launches kernels on tensors of the meta device. Nothing is compiled.

    For a process that launches nothing itself: Triton remembers the target.
    """
    found: dict[tuple[Any, str], Kernel] = {}
    original = JITFunction._do_compile

    def note(self: Any, key: str, *rest: Any) -> None:
        found.setdefault((self, key), Kernel(self, (key, *rest)))

    driver.set_active(_Absent(gpu))
    JITFunction._do_compile = note
    try:
        with compiling_for(gpu), _without_dynamo():
            work()
    finally:
        JITFunction._do_compile = original
    return list(found.values())


def compile_all(
    kernels: Sequence[Kernel], jobs: int, progress: Callable[[int, int], None] | None = None
) -> tuple[list[str], list[Kernel]]:
    """Compile in `jobs` processes forked from this one, which must have no other threads.

    Returns the hashes that Triton's cache knows them by, and the kernels that failed. After `collect`. Each process
    takes the next kernel that none has taken, what takes longest first; one that dies costs its kernel alone.
    """
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
                if not worker.ended_well():  # the compiler aborted it: the next kernels are for another one
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
        """A kernel that it is through with, and its hash if it compiled; None: the process has ended."""
        data = os.read(self._pipe, _REPORT.size)
        if len(data) == _REPORT.size:
            index, name = _REPORT.unpack(data)
            return index, name.rstrip(b"\0").decode()
        return None

    def ended_well(self) -> bool:
        os.close(self._pipe)
        return os.waitpid(self._pid, 0)[1] == 0


def _compile_next(kernels: Sequence[Kernel], tickets: int, reports: int) -> None:
    gc.freeze()  # what is there is shared with the processes beside this one, as long as nobody touches it
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
    """Build the glue between Python and the driver of one kernel, or (None) of all."""
    # Without a driver's library there is nothing to link to: AssertionError. Triton 3.7 has one launcher for all.
    with suppress(AssertionError, AttributeError):
        if compiled is None:
            nvidia.CudaUtils()
        else:
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
