"""`PrivateSocket`: where the engine listens: a socket without a name, which only heirs of its descriptors can reach.

A Unix socket needs a name for as long as it takes to bind it. Then the name goes, so that no cleaner of temporary files
can take it away, nothing is left behind by a daemon that is killed, and no path is too long: who holds `path_fd`, the
daemon and those it has started, connects through /proc. All engines of a daemon listen here, one after the other.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile

from weft.engine.errors import ConfigError

BACKLOG = 128


class PrivateSocket:
    """Attributes:
    fd: the listening socket, for the engine process.
    path_fd: for those that connect; they must have it under the same number.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` where no socket can be made."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            directory = tempfile.mkdtemp(prefix="weft-")  # of mode 0700
            try:
                folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
                try:
                    path = f"/proc/self/fd/{folder}/engine"  # short, whatever the directory is called
                    self._socket.bind(path)
                    self.path_fd = os.open(path, os.O_PATH)
                finally:
                    os.close(folder)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            where = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
            raise ConfigError(
                f"no socket can be made in {where}: {error.strerror or error}; set TMPDIR to another directory"
            ) from None
        self.fd = self._socket.fileno()

    @property
    def address(self) -> str:
        """For zmq, in this process and in those that have inherited `path_fd`."""
        return f"ipc:///proc/self/fd/{self.path_fd}"

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self.path_fd)
