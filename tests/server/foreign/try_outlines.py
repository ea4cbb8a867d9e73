"""outlines over OpenAI's, vLLM's, SGLang's and Anthropic's clients."""

from __future__ import annotations

import re
from typing import Any, Literal

import anthropic
import openai
import outlines
import pydantic
from outlines.types import CFG, JsonSchema, Regex
from trial import URL, run, tries

api = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0}


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


@tries("chat", "plain")
def plain() -> None:
    assert "42" in outlines.from_openai(api, "demo")("What is 12 + 30?", **OPTIONS)


@tries("chat", "streamed")
def streamed() -> None:
    assert "42" in "".join(outlines.from_openai(api, "demo").stream("What is 12 + 30?", **OPTIONS))


@tries("chat", "schema")
def schema() -> None:
    Pet.model_validate_json(outlines.from_openai(api, "demo")("A pet?", Pet, **OPTIONS))


FORMS: Any = {
    "choice": (Literal["x", "y"], "[xy]"), "regex": (Regex("[a-c]{3}"), "[a-c]{3}"),
    "schema": (JsonSchema(Pet.model_json_schema()), "(?s).*kind.*"), "grammar": (CFG('start: "ab" | "cd"'), "ab|cd"),
}  # fmt: skip
for name, (form, pattern) in FORMS.items():

    @tries("chat", f"vLLM's {name}")
    def vllm(form: Any = form, pattern: str = pattern) -> None:
        assert re.fullmatch(pattern, outlines.from_vllm(api, "demo")("Something?", form, **OPTIONS))

    if name in ("regex", "schema"):

        @tries("chat", f"SGLang's {name}")
        def sglang(form: Any = form, pattern: str = pattern) -> None:
            assert re.fullmatch(pattern, outlines.from_sglang(api, "demo")("Something?", form, **OPTIONS))


@tries("messages", "plain")
def messages() -> None:
    made = outlines.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), "demo")
    assert "42" in made("What is 12 + 30?", **OPTIONS)


run()
