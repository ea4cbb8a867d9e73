"""A stand-in: types of OpenAI's API under SGLang's names. Their content is not checked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Request(_Open):
    model: str | None = None
    stream: bool = False


class ChatCompletionRequest(_Request):
    messages: list[dict[str, Any]]


class CompletionRequest(_Request):
    prompt: Any


class EmbeddingRequest(_Request):
    input: Any


class ScoringRequest(_Request):
    pass


class TokenizeRequest(_Request):
    pass


class DetokenizeRequest(_Request):
    pass


class ChatCompletionResponse(_Open):
    pass


class ChatCompletionStreamResponse(_Open):
    pass


class CompletionResponse(_Open):
    pass


class CompletionStreamResponse(_Open):
    pass


class DetokenizeResponse(_Open):
    pass


class EmbeddingResponse(_Open):
    pass


class ScoringResponse(_Open):
    pass


class TokenizeResponse(_Open):
    pass
