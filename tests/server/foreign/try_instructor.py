"""instructor: its modes of chat, of responses and of Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import instructor
import openai
import pydantic
from trial import URL, run, tries

MESSAGES: Any = [{"role": "user", "content": "A pet?"}]
api = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):

    @tries("chat", mode)
    def chat(mode: str = mode) -> None:
        made: Any = instructor.from_openai(api, mode=instructor.Mode[mode])
        requested = {"model": "demo", "messages": MESSAGES, "response_model": Pet, "temperature": 0, "max_tokens": 100}
        assert isinstance(made.create(**requested), Pet)
        *_, last = made.create_partial(**requested)
        assert last.kind in ("cat", "dog")


@tries("responses", "RESPONSES_TOOLS")
def responses() -> None:
    made: Any = instructor.from_openai(api, mode=instructor.Mode.RESPONSES_TOOLS)
    pet = made.responses.create(model="demo", input="A pet?", response_model=Pet, temperature=0, max_output_tokens=100)
    assert isinstance(pet, Pet)


@tries("messages", "ANTHROPIC_TOOLS")
def messages() -> None:
    plain = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    made: Any = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    assert isinstance(made.create(model="demo", messages=MESSAGES, response_model=Pet, max_tokens=100), Pet)


run()
