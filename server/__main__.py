"""Where the `weft` command begins: from the first moment Ctrl-C ends it without a word, and an engine comes to life."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a moment, and leave nothing to put in order
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help"} & set(sys.argv):
        from weft.engine.wire.blank import Blank

        Blank.begin()  # if the options are refused, it ends with this process
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


if __name__ == "__main__":
    raise SystemExit(main())
