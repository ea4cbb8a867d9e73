"""Request fields about speculation: OpenAI's `prediction`, and `speculation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.server.api.field_types import INT32
from weft.server.bodies import Body


class PredictedPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that the answer may repeat in part. Drafts come from it, too."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=1024)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SpeculationLimit(Body):
    """What a request allows speculation to do. It never changes the answer."""

    max_tokens: int | None = Field(None, ge=0, le=INT32)
    """Maximum draft tokens of an iteration; 0 for none."""
