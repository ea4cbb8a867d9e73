"""Serves the page at `/`: a dashboard of the daemon and a chat, in one document that loads no other resource."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter, Response

PATH = "/"
SCRIPTS = (
    "metrics.js",
    "format.js",
    "chart.js",
    "api.js",
    "dashboard.js",
    "markdown.js",
    "history.js",
    "images.js",
    "chat.js",
)
"""Scripts in dependency order; the page joins them into one module."""

_FOLDER = Path(__file__).with_name("ui_files")

router = APIRouter()


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def page_headers(style: str, script: str, *policies: str) -> dict[str, str]:
    """The headers of a page that contains this style and script and may load nothing else. `policies`: further
    directives of its Content-Security-Policy."""
    inline = (
        f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in (("script", script), ("style", style))
    )
    none = (f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"))
    policy = (*none, *inline, "connect-src 'self'", "require-trusted-types-for 'script'", *policies)
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _assemble() -> tuple[bytes, dict[str, str]]:
    """Return the document and its headers."""
    style, script = _read("style.css"), "\n".join(map(_read, SCRIPTS))
    page = _read("index.html")
    for empty, content in (("<style></style>", style), ('<script type="module"></script>', script)):
        opening, closing = empty.split("><")
        page = page.replace(empty, f"{opening}>{content}<{closing}", 1)
    alone = {f"cross-origin-{name}-policy": "same-origin" for name in ("opener", "resource")}
    return page.encode(), {**page_headers(style, script, "img-src data:"), **alone}


_PAGE, _HEADERS = _assemble()


@router.head(PATH, include_in_schema=False)
@router.get(PATH, include_in_schema=False)
async def page() -> Response:
    return Response(_PAGE, headers=_HEADERS)
