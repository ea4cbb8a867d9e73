"""`Front`: the daemon's port, API keys, certificate and connection to the service manager."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.daemon.certificate import Certificate
from weft.server.daemon.handover import Handover, find
from weft.server.daemon.listen import copy_of, distribute, inherited, listen, listen_unix
from weft.server.daemon.notify import Notifier
from weft.server.keys import load_keys, renumbered
from weft.server.observe.server_urls import publish, url_of

MIN_KEYS = 1024  # Minimum capacity, so that a reload can add keys.
RELOAD_SECONDS = 10.0  # Seconds to read keys and certificate, whose disk may hang.
MAX_READING = 4  # Reads that may hang at once.

logger = logging.getLogger("weft")


class Front:
    """The port, keys and certificate of a daemon.

    Attributes:
    listeners: listeners of each API process. The daemon keeps them open, so that connections to a process that died
        wait for its successor.
    keys: digests by number; a gap is an empty one.
    best_priorities: the best priority of each key.
    key_capacity: maximum number of keys.
    taking_over: whether another daemon has the port until `serving`."""

    def __init__(self, config: ServeConfig) -> None:
        """Take the port. Raises `ConfigError` if the operator must change something."""
        self.notifier = Notifier()
        self._config = config
        # Report unusable folders early. Their modules import the web framework, which takes tenths of a second.
        if config.responses_dir is not None:
            from weft.server.api.responses.store import Store

            Store.open(config).close()
        if config.files_dir is not None:
            from weft.server.batches.records import Folder

            Folder.open(config.files_dir, config.files_max_gib)
        for each in config.each:
            if each.chat_template is not None:
                from weft.server.text.chat_template import read_chat_template

                read_chat_template(each.chat_template)
        self.certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert is not None else None
        best = load_keys(config)
        self.keys, self.best_priorities = list(best), list(best.values())
        self.key_capacity = max(MIN_KEYS, 2 * len(self.keys))
        self._predecessor = find(config.handover) if config.handover is not None else None
        if self._predecessor is not None:
            taken = self._predecessor.listeners
            name = taken[0].getsockname()
            kind, here = ("socket", name) if isinstance(name, str) else ("port", name[1])
            wanted = config.port if config.uds is None else str(Path(config.uds).absolute())
            if wanted not in (0, here):
                raise ConfigError(f"--handover {config.handover}: the daemon there uses {kind} {here}, not {wanted}")
        elif config.uds is not None:
            taken = [listen_unix(config.uds)]
        else:
            taken = inherited() or listen(config.host, config.port, config.api_workers)
        self._taken = taken
        self._socket_file = None if config.uds is None else Path(config.uds).absolute()  # to remove at the end
        self._admin = self._admin_listener()
        self.listeners = distribute(taken, config.api_workers)
        if self._admin is not None:
            for own in self.listeners:
                own.append(copy_of(self._admin))
        self._url_fd: int | None = publish(url_of(self.address, tls=config.tls_cert is not None))
        self._handover: Handover | None = None
        self._serving = False
        self._num_reading = 0

    def _admin_listener(self) -> socket.socket | None:
        """The listener of --admin-port. Raises `ConfigError`."""
        wanted, theirs = self._config.admin_port, self._predecessor.admin if self._predecessor is not None else None
        if wanted is None or (theirs is not None and wanted in (0, theirs.getsockname()[1])):
            return theirs if wanted is not None else None
        return listen(self._config.host, wanted, 1, "--admin-port")[0]

    @property
    def taking_over(self) -> bool:
        return self._predecessor is not None

    @property
    def address(self) -> tuple[str, int] | str:
        """Address of the port, or the path of the Unix socket."""
        name = self._taken[0].getsockname()
        return name if isinstance(name, str) else name[:2]

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Address of --admin-port."""
        return None if self._admin is None else self._admin.getsockname()[:2]

    def serving(self, on_successor: Callable[[], None]) -> None:
        """Mark everything as serving: stop the predecessor and wait for a successor."""
        if self._config.handover is not None:

            def hand_over() -> None:
                self._socket_file = None
                on_successor()

            self._handover = Handover(self._config.handover, self._taken, hand_over, self._admin)
            try:
                self._handover.open()
            except OSError as error:
                logger.error("--handover %s: %s; no daemon can take over", self._config.handover, error)
        if self._predecessor is not None:
            logger.info("taking the port over from process %d", self._predecessor.pid)
            self._predecessor.replace()
            self._predecessor = None
        self._serving = True
        self.still_serving()

    async def reload(self) -> bool:
        """Reload keys and certificate. If they are unusable, or cannot be read in time, log an error, keep the old ones
        and return False."""
        if self._serving:
            self.notifier.reloading()
        try:
            best, pem = await self._read_again()
            keys = renumbered(self.keys, best, self.key_capacity)
        except ConfigError as error:
            logger.error("SIGHUP: %s; keeping the old keys and certificate", error)
            return False
        else:
            self.keys, self.best_priorities = keys, [best.get(key, 0) for key in keys]
            if self.certificate is not None:
                self.certificate.use(pem)
            what = " and the certificate" if self.certificate is not None else ""
            logger.info("SIGHUP: reloaded %d API keys%s", len([key for key in keys if key]), what)
            return True
        finally:
            self.still_serving()

    async def _read_again(self) -> tuple[dict[bytes, int], bytes]:
        """Return keys and certificate from their files. Raises `ConfigError` if they are unusable or a disk hangs."""
        if self._num_reading >= MAX_READING:
            raise ConfigError(f"{MAX_READING} earlier reads of the key file or the certificate hang")
        loop = asyncio.get_running_loop()
        read: asyncio.Future[tuple[dict[bytes, int], bytes]] = loop.create_future()
        self._num_reading += 1

        def run() -> None:
            error: Exception | None = None
            found: tuple[dict[bytes, int], bytes] = {}, b""
            try:
                found = load_keys(self._config), b"" if self.certificate is None else self.certificate.read()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the daemon has ended
                loop.call_soon_threadsafe(ended, found, error)

        def ended(found: tuple[dict[bytes, int], bytes], error: Exception | None) -> None:
            self._num_reading -= 1
            if read.done():
                return  # too late
            if error is None:
                read.set_result(found)
            else:
                read.set_exception(error)

        # Not a thread of the loop's pool: the end of the daemon would wait for it.
        threading.Thread(target=run, name="weft-reload", daemon=True).start()
        try:
            return await asyncio.wait_for(read, RELOAD_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"the key file or the certificate could not be read within {RELOAD_SECONDS:g} seconds"
            ) from None

    def still_serving(self) -> None:
        """Report the daemon as ready once it serves."""
        if self._serving:
            names = ", ".join(each.model_names[0] for each in self._config.each)
            address = self.address
            self.notifier.ready(f"serving {names} on {address if isinstance(address, str) else f'port {address[1]}'}")

    def close(self) -> None:
        """Release the port, and remove a Unix socket unless a successor has it. Idempotent."""
        if self._socket_file is not None:
            self._socket_file.unlink(missing_ok=True)
            self._socket_file = None
        if self._handover is not None:
            self._handover.close()
        if self._url_fd is not None:
            os.close(self._url_fd)
            self._url_fd = None
        admin = [] if self._admin is None else [self._admin]
        for listener in [*self._taken, *admin, *(one for own in self.listeners for one in own)]:
            listener.close()
