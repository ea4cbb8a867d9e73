"""Serves the page at `/`: a dashboard of the daemon and a chat, in one document that loads no other resource."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter, Response

PATH = "/"
SCRIPTS = ("metrics.js", "format.js", "chart.js", "api.js", "dashboard.js", "markdown.js", "history.js", "chat.js")
"""Scripts in dependency order; the page joins them into one module."""

_FOLDER = Path(__file__).with_name("ui_files")

router = APIRouter()


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def source_of(text: str) -> str:
    """Return the Content-Security-Policy source of an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _assemble() -> tuple[bytes, dict[str, str]]:
    """Return the document and its headers."""
    style, script = _read("style.css"), "\n".join(map(_read, SCRIPTS))
    page = _read("index.html")
    for empty, content in (("<style></style>", style), ('<script type="module"></script>', script)):
        before, _, after = page.partition(empty)
        opening, closing = empty.split("><")
        page = f"{before}{opening}>{content}<{closing}{after}"
    policy = {
        "default-src": "'none'",
        "script-src": source_of(script),
        "style-src": source_of(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return page.encode(), headers


_PAGE, _HEADERS = _assemble()


@router.head(PATH, include_in_schema=False)
@router.get(PATH, include_in_schema=False)
async def page() -> Response:
    return Response(_PAGE, headers=_HEADERS)
