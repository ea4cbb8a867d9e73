"""`BrowserChecks` refuses requests that a page of another site makes a browser send.

It reads `Host`, `Sec-Fetch-Site` and `Origin`, which browsers set and pages cannot change. Other clients send neither
of the last two, and pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from weft.server.errors import ApiError, clip

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # They change nothing, and other sites cannot read the answers.
_HOST = re.compile(r"(\[[^]]*\]|[^:]*)(?::\d*)?")
_PORTS = {"http": 80, "https": 443}


class BrowserChecks:
    """A page whose name an attacker points at this server (DNS rebinding) sends its own name as `Host`. A page of
    another site that sends a form or an upload has a `Sec-Fetch-Site` or an `Origin` that gives it away."""

    def __init__(self, hosts: Sequence[str], origins: Sequence[str], local_hosts: Sequence[str] = ()) -> None:
        """`hosts`: `--allowed-host`. `origins`: `--cors-origin`. `local_hosts`: allowed at TCP ports if `hosts` is
        empty. If both are empty, all hosts are allowed."""
        self._unix = bool(hosts)  # check hosts at a Unix socket, too
        hosts = hosts or local_hosts
        self._names = frozenset(hosts)
        self._subdomains = tuple(host.removeprefix("*") for host in hosts if host[0] in "*.")
        self._any_host = not hosts or "*" in self._names
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope) -> ApiError | None:
        """The error for a request that must not be answered."""
        site, host, forwarded, origins = "", "", "", []
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").strip().lower()
            elif name == b"x-forwarded-host":
                forwarded = value.decode("latin-1").partition(",")[0].strip()
        if not self.allows(host, scope["server"]):
            what = f"This server is not {clip(host)!r}. Its operator can allow the name with --allowed-host."
            return ApiError(403, what, code="host_not_allowed")
        if scope["method"] in SAFE_METHODS or site in ("same-origin", "none") or "*" in self._origins:
            return None
        # Without Sec-Fetch-Site (plain http, old browsers), a page of this server has the server's name as its origin.
        # A page cannot set X-Forwarded-Host without a preflight; proxies that change Host set it.
        own = [origin for origin in origins if not site and (_same(origin, host) or _same(origin, forwarded))]
        if all(origin in self._origins or origin in own for origin in origins) and (origins or not site):
            return None
        what = f"A page of another site ({clip(origins[0]) if origins else site}) must not send this request."
        return ApiError(403, f"{what} Its operator can allow it with --cors-origin.", code="cross_site_request")

    def allows(self, host: str, server: tuple[str, int | None] | None = None) -> bool:
        """Whether requests may have this `Host`. Rebinding needs a name, so that addresses and localhost always may,
        and requests of HTTP/1.0 without one. `server`: as in ASGI's scope; browsers cannot reach a Unix socket, which
        has no port."""
        if self._any_host or not host or (server is not None and server[1] is None and not self._unix):
            return True
        match = _HOST.fullmatch(host.lower())
        name = match[1].removesuffix(".") if match else ""
        return (
            name == "localhost"
            or name in self._names
            or name.endswith((".localhost", *self._subdomains))
            or f".{name}" in self._names
            or _is_address(name)
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    """Whether an origin is that of a `Host`."""
    try:
        page, own = urlsplit(origin.lower()), urlsplit(f"//{host.lower()}")
        port = _PORTS.get(page.scheme)
        return bool(page.hostname) and (page.hostname, page.port or port) == (own.hostname, own.port or port)
    except ValueError:
        return False
