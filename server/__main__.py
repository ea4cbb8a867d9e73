"""Where the `weft` command begins: from the first moment Ctrl-C ends it without a word, and an engine comes to life."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

from weft.engine.wire.log_sink import open_standard_files


def main() -> int:
    """Run the command line; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a moment, and leave nothing to put in order
    _open_streams()
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help", "--help-all"} & set(sys.argv):
        from weft.engine.wire.preloaded import PreloadedProcess

        PreloadedProcess.begin()  # if the options are refused, it ends with this process
    from weft.server.daemon.cli import INTERRUPTED
    from weft.server.daemon.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = run()
    if status == INTERRUPTED:
        # Threads that still work, of a download say, would hold the process back.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(INTERRUPTED)
    return status


def _open_streams() -> None:
    """Whatever stdin, stdout and stderr are here, commands and the processes that they start may use them."""
    open_standard_files()
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # it was closed; its descriptor stays, whatever takes its place in `sys`
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(out.fileno(), "w", closefd=False)), encoding=out.encoding,
            errors="replace" if out.errors == "strict" else out.errors,  # a locale may lack a character
            line_buffering=out.line_buffering or out.write_through,
        )  # fmt: skip


class _Stdout(io.FileIO):
    """Remembers in `error` why it could not be written, by which `cli.main` tells it from other errors: what the buffer
    above it could not hand on is not always kept."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


if __name__ == "__main__":
    raise SystemExit(main())
