"""`PrivateSocket`: the engine's listening socket without a name. Only processes that inherit its descriptors reach it.

A Unix socket needs a name only while it is bound. The name is removed at once, so that no cleanup of temporary files
can break it, a killed daemon leaves nothing behind, and no path is too long. Processes that hold `path_fd` connect
through /proc. All engines of a daemon listen here, one after another.
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
    path_fd: a descriptor for clients, which must inherit it under the same number.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` if no socket can be created."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            directory = tempfile.mkdtemp(prefix="weft-")  # of mode 0700
            try:
                folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
                try:
                    path = f"/proc/self/fd/{folder}/engine"  # short for any directory
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
                f"cannot create a socket in {where}: {error.strerror or error}; set TMPDIR to another directory"
            ) from None
        self.fd = self._socket.fileno()

    @property
    def address(self) -> str:
        """Address for zmq, in this process and in those that have inherited `path_fd`."""
        return f"ipc:///proc/self/fd/{self.path_fd}"

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self.path_fd)
