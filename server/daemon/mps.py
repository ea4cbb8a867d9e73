"""`Mps`: NVIDIA MPS for replicas on one GPU. Without it, the driver lets one engine at a time use the GPU.

The control process runs in a folder of this daemon (`mps_guard.py`). Engines that start while `Mps` is active find it
through the environment. If MPS is unavailable, engines run without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from weft.engine.wire.child import command
from weft.server.daemon.mps_guard import CONTROL, LOG, OUTPUT, PIPE, QUIT_SECONDS, environment, quit_mps
from weft.server.daemon.shared_folder import SharedFolder

START_SECONDS = 10.0
ANSWER_SECONDS = 3.0  # Seconds for an answer of the control process.
STOP_SECONDS = 2.0 * QUIT_SECONDS + 2.0
POLL_SECONDS = 0.1
LONGEST_FOLDER = 90  # Characters: MPS creates sockets in it.
PREFIX = "weft-mps-"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""The folder of CUDA if the environment names none."""

logger = logging.getLogger("weft")


class Mps:
    """Attributes:
    active: engines that start now use MPS."""

    def __init__(self) -> None:
        self.active = False
        self._program = ""
        self._guard: asyncio.subprocess.Process | None = None
        self._folder: SharedFolder | None = None
        self._before = {name: os.environ.get(name) for name in (PIPE, LOG)}

    async def start(self) -> None:
        """Start MPS, or use one that runs already. Logs the reason if there is none."""
        why = await self._start()
        if why:
            await self.stop()
            logger.warning("replicas run without MPS and alternate on their GPU: %s", why)

    async def _start(self) -> str:
        """Return why there is no MPS; "" if there is."""
        program = shutil.which(CONTROL)
        if program is None:
            return f"{CONTROL} is not installed"
        self._program = program
        running = Path(self._before[PIPE] or DEFAULT_PIPES)
        if (running / "control").exists() and await self._answers(running):
            self.active = True
            logger.info("replicas share their GPU through the MPS that runs in %s", running)
            return ""
        try:
            self._folder = await asyncio.to_thread(SharedFolder, PREFIX, self._end_abandoned)
        except OSError as error:
            return f"its folder cannot be created: {error.strerror or error}"
        folder = Path(self._folder.name)
        if len(str(folder)) > LONGEST_FOLDER:
            return f"the name of its folder {folder} is too long: set TMPDIR to another directory"
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *command(0, "weft.server.daemon.mps_guard", program, folder), stdin=asyncio.subprocess.PIPE,
                start_new_session=True, pass_fds=(self._folder.lock,),
            )  # fmt: skip
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"
        end = asyncio.get_running_loop().time() + START_SECONDS
        while not await self._answers(folder):
            if self._guard.returncode is not None:
                return f"it ended at the start{_last_line(folder)}"
            if asyncio.get_running_loop().time() > end:
                return f"it did not answer within {START_SECONDS:g} s"
            await asyncio.sleep(POLL_SECONDS)
        os.environ |= {PIPE: str(folder), LOG: str(folder)}
        self.active = True
        logger.info("replicas share their GPU through MPS in %s", folder)
        return ""

    async def _answers(self, folder: Path) -> bool:
        """Return whether a control process answers in this folder."""
        quiet = asyncio.subprocess.DEVNULL
        try:
            asked = await asyncio.create_subprocess_exec(
                self._program, env=environment(folder), stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
            )
        except OSError:
            return False
        try:
            await asyncio.wait_for(asked.communicate(b"get_server_list\n"), ANSWER_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                asked.kill()
            await asked.wait()
        return asked.returncode == 0

    def _end_abandoned(self, folder: Path) -> None:
        quit_mps(self._program, folder, 1)

    async def watch(self) -> None:
        """Wait for the end of MPS. Engines that start afterwards run without it."""
        if self._guard is None:
            return
        await self._guard.wait()
        if self.active:
            assert self._folder is not None
            last = _last_line(Path(self._folder.name))
            self._forget()
            logger.error("MPS ended%s: engines that start from now on alternate on their GPU", last)

    async def stop(self) -> None:
        """End MPS if this daemon started it. Call it after the engines have ended. Idempotent."""
        self._forget()
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            try:
                await asyncio.wait_for(guard.wait(), STOP_SECONDS)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    guard.kill()
                await guard.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def _forget(self) -> None:
        """Restore the environment."""
        self.active = False
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _last_line(folder: Path) -> str:
    """Return what the control process printed last, for a message."""
    for name in (OUTPUT, "control.log"):
        with suppress(OSError):
            if lines := (folder / name).read_text(errors="replace").split("\n")[-20:]:
                said = [line.strip() for line in lines if line.strip()]
                if said:
                    return f" ({said[-1][:200]})"
    return ""
