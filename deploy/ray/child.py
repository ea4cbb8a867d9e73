"""Defines `Child`, a `weft serve` child process of a Ray worker, on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from functools import partial
from typing import Any

import yaml

from weft.engine.errors import WeftError
from weft.engine.wire.child import end_with_parent

STOP_MARGIN = 15.0
"""Seconds beyond --drain-timeout that a daemon gets to exit."""


class Child:
    """Attributes:
    url: URL of its API.
    """

    def __init__(self, process: Process, url: str, drain_seconds: float) -> None:
        self.url = url
        self._process = process
        self._drain_seconds = drain_seconds
        assert process.stdout is not None
        self._reader = asyncio.create_task(_discard(process.stdout))

    @classmethod
    async def start(cls, options: dict[str, Any], seconds: float, drain_seconds: float = 30.0) -> Child:
        """Start a daemon and wait until it is ready. It logs to the worker's stderr, which Ray keeps.

        options: options of `weft serve`, passed in an unnamed file to keep keys out of the command line. Raises
            `WeftError`.

        The event loop must live as long as the child, because the kernel ends the child with this *thread*.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
        file = os.memfd_create("weft.yaml")
        try:
            os.write(file, yaml.safe_dump(options).encode())
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "weft.server", "serve", "--config", f"/dev/fd/{file}", pass_fds=(file,),
                stdin=DEVNULL, stdout=PIPE, env=environment, start_new_session=True,
                # in any case: `ray.kill`, the memory monitor
                preexec_fn=partial(end_with_parent, signum=signal.SIGTERM),
            )  # fmt: skip
        finally:
            os.close(file)
        try:
            async with asyncio.timeout(seconds):
                return cls(process, await _greeting(process), drain_seconds)
        except TimeoutError:
            raise WeftError(f"the daemon was not ready within {seconds:g} s") from None
        finally:
            if sys.exc_info()[0] is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self) -> None:
        """Drain and end the daemon. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(self._drain_seconds + STOP_MARGIN):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._reader.cancel()


async def _greeting(process: Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        if found := re.search(rb" at (https?://\S+)", line):
            return found[1].decode()
    raise WeftError(f"the daemon ended with status {await process.wait()} before it was ready; see its log")


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
