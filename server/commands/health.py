"""`weft health` checks the servers on this machine, for a container's health check.

`python -m weft.server.commands.health` does the same ten times faster, because it does not import the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from urllib.parse import urlsplit

from weft.server.commands.options import add_health_flags
from weft.server.observe.server_urls import UNIX, UnixConnection, published

SECONDS = 2.0  # Maximum seconds to wait for a response.


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if there are servers and all respond with 200."""
    path = "/ready" if arguments.ready else "/health"
    if not (urls := published()):
        print("weft health: this user runs no server here", file=sys.stderr)
        return 1
    failed = 0
    for url in urls:
        status, text = _ask(url, path)
        failed |= status != 200
        print(f"{url} {text}")
    return failed


def _ask(url: str, path: str) -> tuple[int, str]:
    """Return the HTTP status (0 without a response) and the text to print."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if url.startswith(UNIX):
        connection = UnixConnection(parts.path, SECONDS)
    elif parts.scheme == "https":
        # The certificate is for the public name, not for the local address.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, parts.port, timeout=SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        text = str(body["status"] if answer.status == 200 else body["error"]["message"])
    except (KeyError, TypeError):
        return 0, "responds, but is not weft"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, f"does not respond: {error or type(error).__name__}"
    finally:
        connection.close()
    return answer.status, text if answer.status == 200 else f"{answer.status}: {text}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_health_flags(parser)
    raise SystemExit(run(parser.parse_args()))
