"""`policy_of`: the permissions that one of our pages gives the browser."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx


def policy_of(response: httpx.Response) -> dict[str, str]:
    """The policy by directive. One script and one style may run: those of the page, by their hashes."""
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    return policy
