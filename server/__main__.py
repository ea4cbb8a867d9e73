"""Entry point of the `weft` command. Ctrl-C ends it silently from the start, and `serve` preloads an engine process."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

from weft.engine.wire.log_sink import open_standard_files


def main() -> int:
    """Run the command line and return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take time and need no cleanup
    _open_streams()
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help", "--help-all"} & set(sys.argv):
        from weft.engine.wire.preloaded import PreloadedProcess

        PreloadedProcess.begin()  # it ends with this process if the options are invalid
    from weft.server.daemon.cli import INTERRUPTED
    from weft.server.daemon.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = run()
    if status == INTERRUPTED:
        # Background threads, such as downloads, would delay a normal exit.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(INTERRUPTED)
    return status


def _open_streams() -> None:
    """Make stdin, stdout and stderr usable for commands and their child processes, even if closed."""
    open_standard_files()
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # it was closed; keep the descriptor open even if `sys` replaces the file
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(out.fileno(), "w", closefd=False)), encoding=out.encoding,
            errors="replace" if out.errors == "strict" else out.errors,  # the locale may not have every character
            line_buffering=out.line_buffering or out.write_through,
        )  # fmt: skip


class _Stdout(io.FileIO):
    """Stores a write error in `error`, so that `cli.main` can distinguish it; the buffer above may drop it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


if __name__ == "__main__":
    raise SystemExit(main())
