"""The sampling fields of a body reach the engine from every endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from weft.engine.wire.sampling import SamplingParams
from weft.server.api.protocol import ChatBody, CompletionBody, GenerationBody

FIELDS: dict[str, Any] = {
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"9": 2.0},
    "seed": -3,
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "allowed_token_ids": [8, 9, 8],
    "bad_words": ["x y"],
    "logprob_token_ids": [6, 7, 6],
}
BODIES: list[tuple[type[GenerationBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "x"}),
    (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(("body", "required"), BODIES)
def test_every_field_arrives_under_its_name(body: type[GenerationBody], required: dict[str, Any]) -> None:
    params = body.model_validate({**required, **FIELDS}).sampling(max_tokens=9, logprobs=1, prompt_logprobs=2)
    expected = {
        **FIELDS,
        "logit_bias": {9: 2.0},
        "stop_token_ids": (4, 5),
        "allowed_token_ids": (8, 9),
        "bad_words": ("x y",),
        "logprob_token_ids": (6, 7),
    }
    assert params == SamplingParams(**expected, max_tokens=9, logprobs=1, prompt_logprobs=2)
    others = {"max_tokens", "logprobs", "prompt_logprobs", "grammar", "grammar_bytes", "thinking", "pooling"}
    assert set(SamplingParams.__struct_fields__) == set(FIELDS) | others, "a field that this test does not send"


@pytest.mark.parametrize(("body", "required"), BODIES)
def test_a_body_without_fields_requests_the_engines_defaults(
    body: type[GenerationBody], required: dict[str, Any]
) -> None:
    params = body.model_validate(required).sampling(max_tokens=16, logprobs=None, prompt_logprobs=None)
    assert params == SamplingParams()
