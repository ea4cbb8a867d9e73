"""The first two steps of a chat turn: `parse_chat` checks the request, `render_prompt` makes its prompt."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import xxhash

from weft.server.api.chat_message import ChatMessage
from weft.server.api.media.prompt import PromptImages, encode_with_images
from weft.server.api.model_text import EncodedChat
from weft.server.api.protocol import ChatBody
from weft.server.api.service import Service
from weft.server.api.turn_parser import ThinkingMarks, thinking_marks
from weft.server.errors import bad_request
from weft.server.text.image_marks import without_secret
from weft.server.tools.messages import knows_tools, stable_prefix, write_out
from weft.server.tools.template import TemplateBody
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tool_parsers import UNKNOWN, tool_format
from weft.server.tools.tools import Tool


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A checked request and everything about it that does not depend on the prompt."""

    body: ChatBody
    service: Service  # the service of the requested model
    tools: list[Tool]  # the tools that the model is offered
    tool_format: ToolFormat | None  # the syntax of calls; None if no tools are offered
    salt: str  # separates cached prefixes and tokenizations of different clients
    names: tuple[bytes, ...]  # names of the conversation, see `names_of`

    @property
    def must_call(self) -> bool:
        """The answer consists of tool calls only."""
        return self.tool_format is not None and self.body.tool_choice != "auto"


class RenderedPrompt(NamedTuple):
    ids: list[int]
    text: str  # the rendered text, with the seams of `Tokenizer.as_text`
    thinking: ThinkingMarks | None
    images: PromptImages | None


async def parse_chat(body: ChatBody, scope: MutableMapping[str, Any], service: Service) -> ParsedChat:
    """Check the request, wake its model if it sleeps, and start prefetching its pages. Raises `ApiError`."""
    service = await service.enter(body.model, scope, body.check)
    loaded = service.loaded
    loaded.text.check_sampled_ids(body)
    salt = scope["weft.salt"] + body.cache_salt
    names = names_of(body, salt)
    if is_later_turn(body):
        loaded.replicas.prefetch(names)  # runs while the prompt is rendered
    tools = _offered(body)
    return ParsedChat(body, service, tools, _tool_format(service, body) if tools else None, salt, names)


async def render_prompt(chat: ParsedChat, scope: MutableMapping[str, Any]) -> RenderedPrompt:
    """Render and tokenize the conversation, and prepare its images. Raises `ApiError`."""
    prompt, images = await _encode(chat.body, chat.tools, chat.service, scope, pixels=True, salt=chat.salt)
    return RenderedPrompt(prompt.ids, prompt.text, thinking_marks(chat.service, prompt.ids), images)


async def prompt_ids(body: ChatBody, scope: MutableMapping[str, Any], service: Service) -> list[int]:
    """Token ids of a request's prompt, for endpoints that generate nothing. Raises `ApiError`."""
    service = await service.enter(body.model, scope, body.check)
    return (await _encode(body, _offered(body), service, scope))[0].ids


def template_input(
    body: TemplateBody, messages: Sequence[ChatMessage], tools: list[Tool], service: Service
) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
    """The messages and the arguments of the chat template.

    Tools are an argument if the template supports them; otherwise they are written into the messages. Later messages
    never change how earlier ones are rendered (`stable_prefix`)."""
    tokenizer = service.loaded.tokenizer
    messages = stable_prefix(messages, late_system=tokenizer.takes_late_system)
    if knows_tools(tokenizer):
        return messages, body.template_arguments(tools, tokenizer.chat_template or "")
    form = tool_format(service.config.tool_call_parser, tokenizer) or UNKNOWN
    as_text = (lambda text: text) if service.config.allow_special_tokens else tokenizer.as_text
    return write_out(messages, tools, form, as_text), body.template_arguments([], tokenizer.chat_template or "")


def _offered(body: ChatBody) -> list[Tool]:
    return [] if body.tool_choice == "none" else body.tools


async def _encode(
    body: ChatBody, tools: list[Tool], service: Service, scope: MutableMapping[str, Any], *, pixels: bool = False,
    salt: str | None = None,
) -> tuple[EncodedChat, PromptImages | None]:  # fmt: skip
    truncation = body.truncation(service.loaded.ready.max_model_len, body.output_limit)
    if truncation is not None and any(message.images for message in body.messages):
        what = "truncate_prompt_tokens: prompts with images cannot be truncated; leave out old messages."
        raise bad_request(what, "truncate_prompt_tokens")
    prompt, images = await encode_with_images(
        service.loaded,
        template_input(body, body.messages, tools, service),
        scope,
        pixels=pixels,
        add_special_tokens=bool(body.add_special_tokens),
        truncation=truncation,
        salt=salt,
    )
    if not prompt.ids:
        raise bad_request("messages: truncation leaves no tokens.", "truncate_prompt_tokens")
    return prompt, images


def _tool_format(service: Service, body: ChatBody) -> ToolFormat:
    form = tool_format(service.config.tool_call_parser, service.loaded.tokenizer)
    if form is None and body.tool_choice == "auto":
        raise bad_request(
            "This server does not know how this model writes tool calls, so the model cannot choose to make one. "
            "Use tool_choice 'required' or a named tool, or start the server with --tool-call-parser.",
            "tools",
            "tools_not_supported",
        )
    return form or UNKNOWN


_BEGINNING, _KEY = b"beginning", b"key"


def names_of(body: ChatBody, salt: str) -> tuple[bytes, ...]:
    """16-byte names, the most specific first: a hash of the conversation through its first user message, and a hash of
    the client's `prompt_cache_key`, if any. Both depend on the salt."""
    first = next((i for i, message in enumerate(body.messages) if message.role == "user"), len(body.messages) - 1)
    messages = stable_prefix(body.messages[: first + 1], late_system=True)
    beginning = [[message.role, without_secret(message.content or "")] for message in messages]
    names = [_name(salt, _BEGINNING, orjson.dumps(beginning))]
    if body.prompt_cache_key is not None:
        names.append(_name(salt, _KEY, body.prompt_cache_key.encode("utf-8", "surrogatepass")))
    return tuple(names)


def is_later_turn(body: ChatBody) -> bool:
    """The conversation has an earlier answer, so its pages may exist."""
    return any(message.role == "assistant" for message in body.messages)


def _name(salt: str, kind: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(b"\0".join((salt.encode("utf-8", "surrogatepass"), kind, value)))
