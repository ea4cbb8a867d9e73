"""`encode_with_images`: a conversation as token ids, with the placeholders of its images."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from weft.engine.wire.messages import Image
from weft.server.api.chat_message import ChatMessage
from weft.server.api.media.model_images import Placed, Prepared, Shelved
from weft.server.api.media.sources import OpenFile
from weft.server.api.model_text import EncodedChat
from weft.server.api.service import LoadedModel, Service
from weft.server.errors import ApiError, bad_request
from weft.server.text.image_marks import ids_in
from weft.server.text.tokenizer import Tokenizer, Truncation

_PLACE = re.compile(r"messages\[\d+\]\.content\[\d+\]")


class PromptImages(NamedTuple):
    """The images of a prompt, for the engine."""

    spans: tuple[Image, ...]
    shelved: Shelved


async def encode_with_images(
    loaded: LoadedModel, conversation: tuple[Sequence[ChatMessage], Mapping[str, Any]],
    scope: MutableMapping[str, Any], *, add_special_tokens: bool, pixels: bool = False,
    truncation: Truncation | None = None, salt: str | None = None,
) -> tuple[EncodedChat, PromptImages | None]:  # fmt: skip
    """Render and tokenize a conversation, see `ModelText.encode_chat`. Each image becomes its placeholder. Without
    `pixels` images are only measured. Raises `ApiError`."""
    messages, arguments = conversation
    images = _placed(messages)
    if not images:
        prompt = await loaded.text.encode_chat(
            messages, arguments, add_special_tokens=add_special_tokens, truncation=truncation, salt=salt
        )
        return prompt, None
    model = loaded.images
    if model is None:
        param = images[0].param
        raise bad_request(f"{param}: images are not supported: this model takes text only.", param)
    model.check_number(images)
    by_id = {each.part.id: each for each in images}
    found, shelved = await model.load(by_id, _files_of(scope), pixels=pixels, salt=salt or "")
    prompt = await loaded.text.encode_chat(
        messages, arguments, add_special_tokens=add_special_tokens, salt=salt, images=model.rule
    )
    order = [found[id] for id in ids_in(message.content for message in messages)]
    ids, spans = model.expand(prompt.ids, order)
    text = _written_out(prompt.text, loaded.tokenizer, model.rule.marker, order)
    return EncodedChat(ids, text), PromptImages(spans, shelved)


def _placed(messages: Sequence[ChatMessage]) -> list[Placed]:
    return [
        Placed(image, f"messages[{i}].content[{image.place}]")
        for i, message in enumerate(messages)
        for image in message.images
    ]


def without_place(error: ApiError) -> ApiError:
    """An error about an image, for a request that has other messages than the chat made from it."""
    if error.param is None or not _PLACE.fullmatch(error.param):
        return error
    message = error.message.replace(error.param, "messages", 1)
    return ApiError(error.status, message, param="messages", code=error.code, retry_after=error.retry_after)


def _written_out(text: str, tokenizer: Tokenizer, marker: int, images: Sequence[Prepared]) -> str:
    """The rendered text with placeholders, so that its length fits the token ids'."""
    first, *rest = text.split(tokenizer.token_name(marker))
    placeholders = ("".join(tokenizer.token_text(r.token_id) * r.length for r in i.plan.placeholder) for i in images)
    return first + "".join(placeholder + after for placeholder, after in zip(placeholders, rest, strict=False))


def _files_of(scope: MutableMapping[str, Any]) -> OpenFile | None:
    """How to find an uploaded file of the request's owner; None if this server stores no files."""
    state = scope["app"].state
    if (folder := getattr(state, "folder", None)) is None:
        return None
    service: Service = state.service
    owner = owner_of_key(service, scope["weft.key"])

    def find(id: str) -> Any:
        return folder.files.content(id) if folder.files.get(id, owner) is not None else None

    return find


def owner_of_key(service: Service, key: int) -> str:
    """The owner of files and batches: a prefix of the key's digest, or empty without keys."""
    return service.keys[key].hex()[:32] if service.keys else ""
