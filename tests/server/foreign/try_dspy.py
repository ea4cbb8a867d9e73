"""dspy: chat, responses and completions through litellm."""

from __future__ import annotations

import contextlib
from typing import Any

import dspy
from trial import URL, run, tries

for kind in ("chat", "responses", "text"):
    for way in ("openai", "hosted_vllm") if kind != "text" else ("openai",):

        @tries({"text": "completions"}.get(kind, kind), f"plain, {way}")
        def plain(kind: Any = kind, way: str = way) -> None:
            model = f"{'text-completion-openai' if kind == 'text' else way}/demo"
            lm = dspy.LM(model, api_base=f"{URL}/v1", api_key="none", model_type=kind, temperature=0.0, max_tokens=40,
                         cache=False, num_retries=0)  # fmt: skip
            (answer, *_) = lm("What is 12 + 30?")
            text = answer["text"] if isinstance(answer, dict) else answer
            assert text if kind == "text" else "42" in text


@tries("chat", "signature")
def signature() -> None:
    """The demo model cannot answer in this form; the test only requires that the request succeeds."""
    lm = dspy.LM("openai/demo", api_base=f"{URL}/v1", api_key="none", temperature=0.0, max_tokens=40, cache=False)
    with dspy.context(lm=lm), contextlib.suppress(dspy.utils.exceptions.AdapterParseError):
        dspy.Predict("question -> answer")(question="What is 12 + 30?")


run()
