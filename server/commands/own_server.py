"""`own_server`: `weft serve` as a child process, for as long as somebody talks to it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO

from rich.console import Console

from weft.engine.errors import WeftError
from weft.engine.model.hub import find_model
from weft.engine.wire.child import end_with_parent

STOP_SECONDS = 15.0


@contextlib.contextmanager
def own_server(model: str, revision: str | None, notes: Console, names: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server of `model` on a free port, once it is ready. Raises `WeftError`: what it said.

    names: that the model answers to, instead of its own.
    """
    path = find_model(model, revision)  # here, where its progress is seen
    command = [sys.executable, "-P", "-m", "weft.server", "serve", model if model == "demo" else str(path)]
    command += ["--port", "0", "--no-access-log", "--no-ui"]
    command += ["--served-model-name", *names] if names else []
    # Keys and the like of a server that runs beside are not for this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    try:
        kept = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed below
    except OSError as error:
        why = f"a server's log has no place: {error.strerror or error}"
        raise WeftError(f"{why}; set TMPDIR to another directory") from None
    with kept as log:
        # A group of its own: Ctrl-C ends an answer, not the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
            env=environment,
            # whatever ends this process, the server drains and ends too
            preexec_fn=partial(end_with_parent, signum=signal.SIGTERM),
        )  # fmt: skip
        try:
            with notes.status(f"starting a server with {model}") as status:
                url = _ready(process, log, status.update)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[str], log: IO[str], tell: Callable[[str], None]) -> str:
    """Read the greeting; `tell` gets the last line of the log meanwhile. Raises `WeftError` when the process ends
    instead."""
    assert process.stdout is not None
    while True:
        if select.select([process.stdout], [], [], 0.5)[0]:
            line = process.stdout.readline()
            if found := re.search(r" at (https?://\S+)", line):
                return found[1]
            if not line:
                process.wait()
                log.seek(0)
                said = [text for text in log.read().splitlines() if text.strip()] or ["the server ended without a word"]
                raise WeftError(re.sub(r"^weft( serve)?: ", "", said[-1]))
        if last := _last_line(log):
            tell(last)


def _last_line(log: IO[str]) -> str:
    end = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 400, max(0, end - 400)).decode(errors="replace")
    return text.strip().rpartition("\n")[2][:100]
