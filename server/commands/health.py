"""`weft health`: whether the servers that run on this machine are well, for a container's health check.

`python -m weft.server.commands.health` is the same in a tenth of the time: nothing of the server's is imported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from urllib.parse import urlsplit

from weft.server.commands.options import add_health_flags
from weft.server.observe.server_urls import published

SECONDS = 2.0
"""that an answer may take"""


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when there are servers and each answers 200."""
    path = "/ready" if arguments.ready else "/health"
    if not (urls := published()):
        print("weft health: no server of this user runs here", file=sys.stderr)
        return 1
    well = True
    for url in urls:
        status, told = _ask(url, path)
        well = well and status == 200
        print(f"{url} {told}")
    return 0 if well else 1


def _ask(url: str, path: str) -> tuple[int, str]:
    """The status, 0 where there is no answer, and what to print."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        # Its certificate is for another name than that of this machine for itself.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, parts.port, timeout=SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        told = str(body["status"] if answer.status == 200 else body["error"]["message"])
    except (KeyError, TypeError):
        return 0, "answers, but as no weft does"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, f"does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return answer.status, told if answer.status == 200 else f"{answer.status}: {told}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_health_flags(parser)
    raise SystemExit(run(parser.parse_args()))
