"""`ImagePart`: an image as a request names it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import xxhash

from weft.engine.images.plan import Detail
from weft.server.errors import clip
from weft.server.text.image_marks import mark

_DETAILS: tuple[Detail, ...] = ("auto", "low", "high")
IMAGE_KINDS = ("image_url", "input_image", "image")
"""Types of parts with an image: OpenAI's chat, OpenAI's responses, Anthropic's messages."""


class ImagePart(NamedTuple):
    kind: Literal["url", "file"]
    source: str
    """A URL (data, http, https or file), or the id of an uploaded file."""
    detail: Detail
    place: int
    """Its place among the message's parts."""

    @property
    def id(self) -> str:
        """Identifies source and detail within a request."""
        name = f"{self.kind} {self.detail} {self.source}"
        return xxhash.xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))

    @property
    def mark(self) -> str:
        return mark(self.id)


def read_part(part: dict[str, Any], place: int) -> ImagePart:
    """Read a content part of one of `IMAGE_KINDS`. Raises `ValueError`."""
    kind, detail = part["type"], part.get("detail")
    if kind == "image":
        return _read_source(part.get("source"), place)
    value = part.get("image_url")
    if isinstance(value, dict):
        detail = value.get("detail", detail)
        value = value.get("url")
    if kind == "input_image" and value is None:
        return ImagePart("file", _text(part.get("file_id"), "image_url or file_id"), _detail(detail), place)
    return ImagePart("url", _text(value, "image_url"), _detail(detail), place)


def _read_source(source: Any, place: int) -> ImagePart:
    """Read the source of an Anthropic image block."""
    match source:
        case {"type": "base64", "data": str(data)}:
            return ImagePart("url", f"data:;base64,{data}", "auto", place)
        case {"type": "url", "url": str(url)}:
            return ImagePart("url", url, "auto", place)
        case {"type": "file", "file_id": str(file)}:
            return ImagePart("file", file, "auto", place)
    raise ValueError("an image needs a source of type base64 (data), url (url) or file (file_id)")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"an image needs a string {what}")
    return value


def _detail(value: Any) -> Detail:
    if value is None:
        return "auto"
    if value not in _DETAILS:
        raise ValueError(f"detail must be one of {', '.join(_DETAILS)}, not {clip(value)!r}")
    return value
