"""Runs `nvidia-cuda-mps-control`, and ends it with everything it started once stdin closes.

stdin closes when the daemon stops, and also when the daemon is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weft.engine.wire.child import end_with_parent

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PR_SET_CHILD_SUBREAPER = 36
QUIT_SECONDS = 5
"""Seconds that clients of MPS have to end."""
OUTPUT = "output.txt"
STDIN = 0


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the control process. The MPS server numbers GPUs as its environment shows them, and
    clients choose among those, so it must see all."""
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**own, PIPE: str(folder), LOG: str(folder)}


def quit_mps(program: str, folder: Path, seconds: int = QUIT_SECONDS) -> None:
    """Ask the control process in `folder` to end, and its clients within `seconds`. Waits at most twice as long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [program], input=f"quit -t {seconds}\n".encode(), env=environment(folder), timeout=2 * seconds,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, preexec_fn=end_with_parent,
        )  # fmt: skip


def children() -> Iterator[int]:
    """Yield the children of this process, including ended ones."""
    own = str(os.getpid()).encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), open(f"{entry.path}/stat", "rb") as file:
                # the second field, the name, may contain spaces and parentheses
                if file.read().rpartition(b")")[2].split()[1] == own:
                    yield int(entry.name)


def kill_all() -> None:
    """Kill all descendants: the children of a killed process become children of this one."""
    while found := list(children()):
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(pid, 0)


def main(program: str, folder: Path) -> int:
    """Run until stdin closes (status 0) or the control process ends (status 1)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        with (folder / OUTPUT).open("wb") as output:
            control = subprocess.Popen(
                [program, "-f"], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(folder),
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        ended = os.pidfd_open(control.pid)
        closed = STDIN in select.select([STDIN, ended], [], [])[0]
        if closed:
            quit_mps(program, folder)
        return 0 if closed else 1
    finally:
        kill_all()
        if select.select([STDIN], [], [], 0)[0]:  # the daemon reads the output, unless it has ended
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
