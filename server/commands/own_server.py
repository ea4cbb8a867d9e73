"""`own_server` runs `weft serve` as a temporary child process."""

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
def own_server(
    model: str, revision: str | None, notes: Console, names: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the URL of a server of `model` on a free port once it is ready. Raises `WeftError` with its last log line.
    `names`: served model names, instead of the model's own. `options`: further options of the server."""
    path = find_model(model, revision)  # download here, so that its progress is visible
    command = [sys.executable, "-P", "-m", "weft.server", "serve", model if model == "demo" else str(path)]
    command += ["--port", "0", "--no-access-log", "--no-ui"]
    command += ["--served-model-name", *names] if names else []
    command += options
    # Do not apply the keys and options of another server to this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    try:
        kept = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed below
    except OSError as error:
        why = f"cannot create the server's log file: {error.strerror or error}"
        raise WeftError(f"{why}; set TMPDIR to another directory") from None
    with kept as log:
        # A separate session: Ctrl-C must stop the answer, not the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
            env=environment,
            # if this process ends, the server drains and ends, too
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


def _ready(process: subprocess.Popen[str], log: IO[str], show: Callable[[str], None]) -> str:
    """Wait for the greeting and return its URL. `show` receives the last log line meanwhile. Raises `WeftError` if the
    process ends first."""
    assert process.stdout is not None
    while True:
        if select.select([process.stdout], [], [], 0.5)[0]:
            line = process.stdout.readline()
            if found := re.search(r" at (https?://\S+)", line):
                return found[1]
            if not line:
                process.wait()
                log.seek(0)
                output = [text for text in log.read().splitlines() if text.strip()] or [
                    "the server ended without an error message"
                ]
                raise WeftError(re.sub(r"^weft( serve)?: ", "", output[-1]))
        if last := _last_line(log):
            show(last)


def _last_line(log: IO[str]) -> str:
    end = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 400, max(0, end - 400)).decode(errors="replace")
    return text.strip().rpartition("\n")[2][:100]
