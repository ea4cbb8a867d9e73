"""Marks: the places of images in the text of a message. And how a chat template is given images.

A message keeps its content as one string. A mark stands where an image belongs, so code that moves or joins text moves
images along. The digits in it are random for each process, so clients cannot write one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Literal

_SECRET = f"image:{secrets.randbits(96)}:"
_MARK = re.compile(rf"{_SECRET}([0-9a-f]{{32}});")

Form = Literal["text", "either", "parts"]
"""What a template takes as content: strings, strings and lists of parts, or lists of parts."""


def mark(id: str) -> str:
    """The mark of an image. `id`: 32 hexadecimal digits."""
    return f"{_SECRET}{id};"


def ids_in(contents: Iterable[str | None]) -> list[str]:
    """Ids of the images in these contents, in order."""
    return [id for content in contents if content for id in _MARK.findall(content)]


def without_secret(content: str) -> str:
    """The content with marks that are the same in every process."""
    return content.replace(_SECRET, "image:")


def after_last(content: str) -> str:
    """The text after the last image."""
    return content if _SECRET not in content else content[[*_MARK.finditer(content)][-1].end() :]


def find_form(render: Callable[[Any], str], probe: str) -> Form:
    """Find out what a template takes. `render`: renders a user message with this content. `probe`: a text that no
    template contains."""

    def shows(content: Any) -> bool:
        try:
            text = render(content)
        except Exception:  # templates raise anything
            return False
        return probe in text and not re.search(r"['\"]type['\"]: ", text)

    parts = shows([{"type": "image"}, {"type": "text", "text": probe}])
    return ("either" if shows(probe) else "parts") if parts else "text"


def for_template(content: str, form: Form, written: str) -> str | list[dict[str, str]]:
    """A message's content as the template takes it. `written`: an image in a template that takes strings."""
    if form == "text" or (form == "either" and _SECRET not in content):
        return _MARK.sub(lambda _: written, content)
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(_MARK.split(content)):
        if i % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]
