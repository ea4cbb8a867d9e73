"""guidance over OpenAI's client and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any

import guidance
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel
from trial import URL, run, tries

BASE: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none"}


def requested(kind: Any) -> Any:
    made = kind("demo", **BASE, echo=False)
    with guidance.user():
        made += "What is 12 + 30?"
    return made


@tries("chat", "plain")
def plain() -> None:
    made = requested(OpenAI)
    with guidance.assistant():
        made += guidance.gen("answer", max_tokens=40, temperature=0.0)
    assert "42" in made["answer"]


@tries("chat", "schema")
def schema() -> None:
    made = requested(OpenAI)
    form = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    with guidance.assistant():
        made += guidance.json("answer", schema=form)
    assert json.loads(made["answer"])["kind"] in ("cat", "dog")


@tries("chat", "vLLM's grammar")
def grammar() -> None:
    made = requested(VLLMModel)
    with guidance.assistant():
        made += guidance.gen("answer", regex="[a-c]{3}")
    assert re.fullmatch("[a-c]{3}", made["answer"])


run()
