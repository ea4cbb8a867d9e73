"""`Stacks`: the stacks of a child process's threads, written to memory shared with the daemon."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from weft.engine.wire.child import STACKS_SIGNAL

FINAL_SIGNAL = signal.SIGUSR1
"""Signal whose handler writes the stacks at once. It may crash the process, because frames may change meanwhile."""
CAPTURE_SECONDS = 10.0  # seconds for a process to write its stacks
FINAL_SECONDS = 2.0  # seconds for a process that is about to be killed
POLL_SECONDS = 0.05
STACKS_BYTES = 256 * 1024  # maximum bytes of stacks to write and to read
END = b"\0"  # End of the stacks. Bytes after it may remain from a longer write.


def own_stacks() -> str:
    """Return the stacks of all threads of this process, innermost call last. It reads no source: the disk may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        "\n".join((f"thread {names.get(ident, ident)}:", *_calls(frame)))
        for ident, frame in sys._current_frames().items()
    )


def _calls(frame: FrameType | None) -> list[str]:
    calls = []
    while frame is not None:
        calls.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return calls[::-1]


def write_stacks_to(stacks_fd: int) -> None:
    """Write the stacks to `stacks_fd` on request, in a child that was started under `stacks_signal_blocked`. A thread
    waits for the signal and writes while it holds the interpreter lock, which is safe."""
    faulthandler.register(FINAL_SIGNAL, stacks_fd, all_threads=True, chain=False)

    def write() -> None:
        while True:
            signal.sigwait([STACKS_SIGNAL])
            # One call, without truncating first: another thread may take the interpreter lock in between, and stacks
            # written by the other signal would be lost.
            os.pwrite(stacks_fd, (own_stacks().encode("utf-8", "replace") + END)[:STACKS_BYTES], 0)

    threading.Thread(target=write, name="weft-stacks", daemon=True).start()


class Stacks:
    """Anonymous memory to which a child writes its stacks, so that it works when pipes are full."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("weft-stacks")

    async def capture(self, pid: int) -> str:
        """Return the kernel state of a process's threads, and their Python stacks if the process can report them. The
        process continues. If it is stopped, or a thread keeps the interpreter lock, there are no Python stacks."""
        kernel = threads(pid)
        if " T " in kernel:
            return _report(kernel, "", "the process is stopped")
        return _report(kernel, await self._request(pid, STACKS_SIGNAL, CAPTURE_SECONDS), "the process does not answer")

    async def final_stacks(self, pid: int, *, wake: bool) -> str:
        """Like `capture`, for a process that is about to be killed: also use the signal that may crash it. `wake`
        continues a stopped process, which cannot report otherwise."""
        kernel = threads(pid)
        if " T " in kernel and not wake:
            return _report(kernel, "", "the process is stopped")
        if not (python := await self._request(pid, STACKS_SIGNAL, FINAL_SECONDS, wake=wake)):
            python = await self._request(pid, FINAL_SIGNAL, FINAL_SECONDS, wake=wake)
        return _report(kernel, python, "the process does not answer, or has just started")

    async def _request(self, pid: int, signum: int, seconds: float, *, wake: bool = False) -> str:
        os.lseek(self.fd, 0, os.SEEK_SET)  # also in the process, which inherited this descriptor
        os.ftruncate(self.fd, 0)
        if _expects(pid, signum):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                if wake:
                    os.kill(pid, signal.SIGCONT)
            await self._written(seconds)
        return os.pread(self.fd, STACKS_BYTES, 0).partition(END)[0].decode("utf-8", "replace").rstrip()

    async def _written(self, seconds: float) -> None:
        """Wait up to `seconds` until something was written and nothing more follows."""
        size, waited = 0, 0.0
        while waited < seconds:
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            now = os.fstat(self.fd).st_size
            if now and now == size:
                return
            size = now

    def __del__(self) -> None:
        os.close(self.fd)  # the watchdog may still read the stacks of an ended process


def threads(pid: int) -> str:
    """Return a line per thread: name, state, kernel function it waits in. Empty if the process has ended."""
    lines = []
    with suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                lines.append(f"  {task.name} {name} {rest.split()[0]} {_wait_channel(task)}")
    return "\n".join(lines)


def _wait_channel(task: Path) -> str:
    with suppress(OSError):
        return (task / "wchan").read_text() or "-"
    return "-"


def _report(kernel: str, python: str, why: str) -> str:
    python = python or f"no Python stacks: {why}"
    return f"threads (name, state, kernel function):\n{kernel}\n{python}"


def _expects(pid: int, signum: int) -> bool:
    """Return whether a process handles a signal or blocks it. Otherwise the signal would end the process."""
    expected = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigCgt:", "SigBlk:")):
                expected |= int(line.split()[1], 16)
    return bool(expected >> (signum - 1) & 1)
