"""`public_addresses`: where a name leads, if only to the public internet; `check_url`: what may be fetched at all."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

MAX_URL = 8192
PORTS = {"http": 80, "https": 443}
_ODD = re.compile(r"[\x00-\x20\x7f\\]")
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""Networks whose addresses lead to IPv4 addresses: NAT64, 6to4 and Teredo."""


class FetchRefused(Exception):
    """The message is one clause for the client."""


class Target(NamedTuple):
    """A checked URL."""

    scheme: str
    host: str  # lower case, without brackets
    port: int
    path: str  # with the query, escaped

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def check_url(url: str, domains: Sequence[str]) -> Target:
    """Check a URL by its text alone. `domains`: names and patterns such as *.example.org; empty allows all. Raises
    `FetchRefused`."""
    if len(url) > MAX_URL:
        raise FetchRefused(f"its URL is longer than {MAX_URL} characters")
    if _ODD.search(url):
        raise FetchRefused("its URL has characters that must be escaped")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise FetchRefused("its URL is invalid") from None
    if parts.scheme not in PORTS:
        raise FetchRefused("its URL must be a data: or https: URL")
    if parts.username is not None or parts.password is not None:
        raise FetchRefused("its URL must not have credentials")
    if ":" not in host:
        try:
            host = host.encode("idna").decode().lower()
        except UnicodeError:
            raise FetchRefused("its URL has an invalid host") from None
        if not _HOST.fullmatch(host):
            raise FetchRefused("its URL has an invalid host")
    port = PORTS[parts.scheme] if port is None else port
    if port not in PORTS.values():
        raise FetchRefused("its URL must use port 80 or 443")
    if domains and not any(_matches(host, domain) for domain in domains):
        raise FetchRefused("its host is not one from which this server fetches images")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + ("?" + _query(parts.query) if parts.query else "")
    return Target(parts.scheme, host, port, path)


def _query(query: str) -> str:
    return quote(query, safe="/?%:@!$&'()*+,;=~-._[]")


def _matches(host: str, domain: str) -> bool:
    domain = domain.removeprefix("*")
    return host.endswith(domain) and host != domain if domain.startswith(".") else host == domain


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif any(ip in network for network in _TRANSLATED):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def public_addresses(target: Target) -> list[str]:
    """The addresses to connect to. Raises `FetchRefused` if any of them is not public."""
    try:
        found = await resolve(target.host, target.port)
    except (OSError, UnicodeError):
        raise FetchRefused("its host cannot be found") from None
    if not found or not all(map(is_public, found)):
        raise FetchRefused("its host is not on the public internet")
    return found
