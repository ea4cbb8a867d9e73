"""`read_chat_template`: the template of `--chat-template`."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError

from weft.engine.errors import ConfigError
from weft.server.errors import clip


def read_chat_template(given: str) -> str:
    """Return the text of a template: of the file `given`, or `given` itself if it has Jinja's braces or several lines.
    Raises `ConfigError` if it cannot be read or compiled."""
    inline = "{" in given or "\n" in given
    try:
        text = given if inline else Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {given}: not UTF-8 at byte {error.start}") from None
    name = "the given template" if inline else given
    if not text.strip():
        raise ConfigError(f"--chat-template {given}: the file is empty")
    from transformers.utils.chat_template_utils import _compile_jinja_template  # as `apply_chat_template` does

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template: {name}, line {error.lineno}: {clip(str(error.message))}") from None
    except TemplateError as error:
        raise ConfigError(f"--chat-template: {name}: {clip(str(error))}") from None
    return text
