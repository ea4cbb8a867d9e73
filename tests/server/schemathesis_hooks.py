"""Rules that no schema can express for schemathesis: fields that exclude each other. With them, valid requests pass the
checks of fields.

Schemathesis loads this module (`SCHEMATHESIS_HOOKS`).
"""

from __future__ import annotations

import itertools
from typing import Any

import schemathesis

from weft.server.tools.template import TemplateBody

GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
)
_OF_OLLAMA: dict[str, dict[str, Any]] = {"/api/chat": {"think": None}, "/api/generate": {"think": None}}
_kept = itertools.cycle((*GRAMMARS, None))


@schemathesis.hook
def before_call(_: Any, case: Any, __: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict) or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    kept = next(_kept)
    for name in GRAMMARS:
        if name != kept:
            body.pop(name, None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("continue_final_message"):
        body["add_generation_prompt"] = False
    for name in ("best_of", "stop_regex", "logprob_token_ids", "guided_whitespace_pattern", "thinking"):
        body.pop(name, None)
    if isinstance(asked := body.get("structured_outputs"), dict):
        for name in ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties"):
            asked.pop(name, None)
    if case.path.endswith("completions") and not (body.get("max_tokens") or body.get("max_completion_tokens")):
        body["max_tokens"] = 2  # none would be the remaining context
    if case.path == "/admin/sleep":
        body["level"] = body.get("level") or 1  # after a pause, requests would wait for an operator
    if case.path.startswith("/api/"):
        case.body = {**body, **_OF_OLLAMA.get(case.path, {}), "model": "demo"}
        case.body["options"] = {**(body.get("options") or {}), "num_predict": 2, "num_ctx": 8, "repeat_last_n": -1}
    if case.path == "/completion":
        body |= {"n_predict": 2, "repeat_last_n": -1, "logit_bias": []}
    if case.path in ("/v1/embeddings", "/classify", "/pooling", "/tokenize") and body.get("messages") is None:
        for name in TemplateBody.model_fields:
            body.pop(name, None)
    if case.path == "/tokenize":
        own = ("add_special", "parse_special", "with_pieces")
        for name in ("add_special_tokens", "return_token_strs") if body.get("content") is not None else own:
            body.pop(name, None)
    if isinstance(form := body.get("response_format"), dict):
        for name in ("schema",) if form.get("type") == "structural_tag" else ("structures", "triggers", "format"):
            form.pop(name, None)
    if case.path == "/v1/embeddings":
        body.pop("prompt_name", None)  # the model has none
        body.pop("truncate_prompt_tokens", None)
        if "dimensions" in body and body["dimensions"] is not None:
            body["dimensions"] = 3
    if case.path == "/v1/responses":
        body.setdefault("max_output_tokens", 2)
        for name in ("previous_response_id", "conversation", "prompt"):
            body.pop(name, None)
        if body.get("response_format") is not None:
            body.pop("text", None)
        if body.get("background"):
            body["store"] = True
    if case.path.endswith("/messages") and body.get("max_tokens"):
        body["max_tokens"] = 2
    for message in body.get("messages") or ():
        # A result without its call is not a conversation, and the template does not render other roles.
        if isinstance(message, dict) and message.get("role") not in ("system", "user", "assistant"):
            message["role"] = "user"
