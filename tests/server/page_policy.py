"""`policy_of`: what a page of ours lets its browser do."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx


def policy_of(response: httpx.Response) -> dict[str, str]:
    """By directive. One script and one style are allowed to run: those of the page, by their hashes."""
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    return policy
