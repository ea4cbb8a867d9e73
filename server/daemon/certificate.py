"""`Certificate`: the last valid certificate and key of `--tls-cert` and `--tls-key`.

API processes read them from anonymous memory, so that a process started while the files are being replaced serves the
same certificate as the others.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from weft.engine.errors import ConfigError


class Certificate:
    """`fd`: a file with the chain and its key in PEM."""

    def __init__(self, cert: str, key: str | None) -> None:
        """Raises `ConfigError` for unusable files."""
        self._paths = [Path(cert)] if key is None else [Path(cert), Path(key)]
        self.fd = os.memfd_create("weft-tls")
        self.use(self.read())

    @property
    def path(self) -> str:
        """Path of the file in any process that has inherited `fd`."""
        return f"/proc/self/fd/{self.fd}"

    def read(self) -> bytes:
        """Return the content of the files. Raises `ConfigError` if they are unusable."""
        try:
            pem = b"\n".join(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise ConfigError(f"--tls-cert, --tls-key: cannot be read: {error.strerror}") from None
        tried = os.memfd_create("weft-tls-tried")
        try:
            os.write(tried, pem)
            _check(f"/proc/self/fd/{tried}")
        finally:
            os.close(tried)
        return pem

    def use(self, pem: bytes) -> None:
        """Replace the certificate by one that was read."""
        os.pwrite(self.fd, pem, 0)
        os.ftruncate(self.fd, len(pem))


def _check(path: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert, --tls-key: not a certificate with its key: {error.reason or error}") from None


def _no_password() -> str:
    raise ConfigError("--tls-key: the key is encrypted; give one without a password")
