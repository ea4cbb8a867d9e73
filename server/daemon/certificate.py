"""`Certificate`: the certificate and key of `--tls-cert` and `--tls-key`, as they were when last found good.

They are kept in anonymous memory, where API processes read them: one that is started while the files are being replaced
serves what the others do.
"""

from __future__ import annotations

import os
import ssl

from weft.engine.errors import ConfigError


class Certificate:
    """Attributes: `fd`, of a file with the chain and its key in PEM."""

    def __init__(self, cert: str, key: str | None) -> None:
        """Raises `ConfigError` for files that cannot serve."""
        self._paths = [cert] if key is None else [cert, key]
        self.fd = os.memfd_create("weft-tls")
        self.reread()

    @property
    def path(self) -> str:
        """For any process that has inherited `fd`."""
        return f"/proc/self/fd/{self.fd}"

    def reread(self) -> None:
        """Take what the files say now. Raises `ConfigError`, and keeps what was, when that cannot serve."""
        pem = self._read()
        tried = os.memfd_create("weft-tls-tried")
        try:
            os.write(tried, pem)
            _check(f"/proc/self/fd/{tried}")
        finally:
            os.close(tried)
        os.pwrite(self.fd, pem, 0)
        os.ftruncate(self.fd, len(pem))

    def _read(self) -> bytes:
        try:
            parts = []
            for path in self._paths:
                with open(path, "rb") as file:
                    parts.append(file.read())
            return b"\n".join(parts)
        except OSError as error:
            raise ConfigError(f"--tls-cert, --tls-key: cannot be read: {error.strerror}") from None


def _check(path: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert, --tls-key: no certificate with its key: {error.reason or error}") from None


def _no_password() -> str:
    raise ConfigError("--tls-key: the key has a password; a daemon cannot type one")
