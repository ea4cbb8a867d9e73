"""`GgufTokenizer`: the tokenizer of a directory that weft made for a GGUF file, without `transformers`.

Importing `transformers` takes half a second, and its loader several times as long as the `tokenizers` library for a
large vocabulary. Templates give the same text as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer as Backend

from weft.engine.errors import ModelError, one_line

_THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thinking: templates read the first, or the second."""


class GgufTokenizer:
    """Has those members of `PreTrainedTokenizerFast` that `Tokenizer` uses."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`, one line."""
        try:
            self.backend_tokenizer = Backend.from_file(str(path / "tokenizer.json"))
            config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises only this type
            raise ModelError(f"{path} has no usable tokenizer: {one_line(error)}") from error
        self.special_tokens_map: dict[str, str] = {k: v for k, v in config.items() if k in _SPECIAL}
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template}
        self.chat_template: str | dict[str, str] | None = template
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = map(self.special_tokens_map.get, _SPECIAL[:4])

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.backend_tokenizer.token_to_id(self.bos_token)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the named template, or the one for conversations with or without tools."""
        known = self.chat_template
        if not isinstance(known, dict):
            return chat_template or known or ""
        if chat_template is None:
            chat_template = "tool_use" if tools is not None and "tool_use" in known else "default"
        return known.get(chat_template, chat_template)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, **arguments: Any
    ) -> str:
        """Render a conversation; absent values count as missing. Raises the template's errors."""
        assert not tokenize
        template = self.get_chat_template(arguments.pop("chat_template", None), arguments.get("tools"))
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **self.special_tokens_map}
        messages = [{k: v for k, v in message.items() if v is not None} for message in conversation]
        if arguments.get("continue_final_message"):
            from transformers.utils.chat_template_utils import render_jinja_template

            return str(render_jinja_template([messages], chat_template=template, **{**variables, **arguments})[0][0])
        arguments.pop("continue_final_message", None)
        return compiled(template).render(messages=list(map(_with_thinking, messages)), **{**variables, **arguments})


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "mask_token")


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    thinking = next((message[name] for name in _THINKING if message.get(name) is not None), None)
    return message if thinking is None else {"thinking": thinking, **message, "reasoning_content": thinking}


class _Generation(Extension):
    """The block `generation`, which marks the assistant's text for training."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """Stands for `dict` in templates without its other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a name in a template may be `self`
        named = dict(*args[1:], **kwargs)
        for name in named:
            _refuse_private(name)
        Namespace.__init__(args[0], named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"chat templates cannot set {name!r} of a namespace")


def _fail(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Like Jinja's filter, but without escaping HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def compiled(template: str) -> Template:
    """Compile a chat template. Raises `TemplateError`."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _fail, "strftime_now": lambda form: datetime.now().strftime(form), "dict": _Dict(),
        "namespace": _Namespace,
    }  # fmt: skip
    return environment.from_string(template)
