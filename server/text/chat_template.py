"""`read_chat_template`: the template of `--chat-template`."""

from __future__ import annotations

from jinja2 import TemplateError, TemplateSyntaxError

from weft.engine.config.tokenizer import read_template
from weft.engine.errors import ConfigError
from weft.server.errors import clip


def read_chat_template(given: str) -> str:
    """Return the text of a template, see `read_template`. Raises `ConfigError` if it cannot be read or compiled."""
    text = read_template(given)
    name = "the given template" if text == given else given
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
