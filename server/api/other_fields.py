"""Request fields that a body does not have: aliases, refusals, fields without effect, and unknown fields.

Clients send fields of vLLM, SGLang, llama.cpp, TGI, Ollama, OpenAI and Anthropic. A field that would change the answer
and is not supported is refused with its alternative. An unknown field is ignored, but reported: in the response header
`IGNORED_HEADER`, and in the log the first time. A null counts as absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from weft.server.bodies import Body
from weft.server.errors import bad_request, clip

IGNORED_HEADER = "x-weft-ignored-fields"
MAX_REPORTED = 16  # unknown fields in the header of a response
MAX_LOGGED = 1000  # different unknown fields that are logged

logger = logging.getLogger(__name__)

ALIASES = {
    "max_new_tokens": ("max_tokens", "max_output_tokens"),  # TGI
    "max_output_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "stop_sequences": ("stop",),
    "rid": ("request_id",),  # SGLang
    "n_cmpl": ("n",),  # llama.cpp
    "thinking_token_budget": ("max_thinking_tokens",),  # vLLM
    "thinking_budget_tokens": ("max_thinking_tokens",),  # llama.cpp
    "reasoning_budget_tokens": ("max_thinking_tokens",),
    "thinking_budget": ("max_thinking_tokens",),  # Qwen
    "use_activation": ("normalize",),  # vLLM
    "activation": ("use_activation", "normalize"),
    "softmax": ("use_activation", "normalize"),
    "queries": ("text_1",),
    "data_1": ("text_1",),
    "items": ("text_2",),
    "data_2": ("text_2",),
    "documents": ("text_2",),
}
"""Fields of other servers that mean the same as one here. The first target that the body has is used."""

NO_LIMIT = frozenset({"thinking_budget_tokens", "reasoning_budget_tokens"})  # aliases whose -1 asks for nothing

_HINTS: dict[str, str] = {
    "service_tier prediction speed moderation inference_geo container betas": "tiers and hints about speed",
    "metadata client_metadata store user safety_identifier": "notes for the operator",
    "tools[].defer_loading tools[].eager_input_streaming tools[].allowed_callers": "all tools are loaded",
    "messages[].annotations messages[].id messages[].tool_calls[].index": "they come from answers",
    "context_management": "a prompt that is too long is refused, not edited",
    "stream_options.include_obfuscation stream_options.include_usage sse_ping_interval": "streams are complete",
    "spaces_between_special_tokens": "the text has no added spaces",
    "guided_decoding_backend structured_outputs.backend structured_outputs._backend "
    "structured_outputs.disable_fallback": "one backend has all grammars",
    "keep_alive n_cache_reuse prompt_cache_options": "models stay loaded, and prompts are always cached",
    "backend_sampling speculative.type speculative.n_max speculative.n_min speculative.p_min "
    "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits "
    "options.draft_num_predict": "they do not change answers",
}
NO_EFFECT = frozenset(name for names in _HINTS for name in names.split())
"""Fields that are accepted, because the answer is the one they ask for, with or without them."""


class Refusal(NamedTuple):
    why: str
    harmless: tuple[Any, ...]  # values that ask for nothing


_SAMPLER = "this server has temperature, top_p, top_k, min_p and penalties"
_IMAGES = "this server takes text only"
_GROUPS: dict[str, str] = {
    "lora lora_path lora_request adapter_id": "send the adapter's name as model",
    "use_beam_search length_penalty early_stopping": "there is no beam search; use n to get several answers",
    "logits_processors custom_logit_processor custom_params vllm_xargs":
        "requests cannot bring code; use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "prompt_embeds embed_overrides embed_override_token_id": "send text or token ids",
    "input_ids": "send token ids as prompt to /v1/completions",
    "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank":
        "prefill and decode run in one engine",
    "data_parallel_rank routed_dp_rank id_slot": "use prompt_cache_key to keep requests together",
    "session_params session_id": "use prompt_cache_key, or previous_response_id in /v1/responses",
    "extra_key": "use cache_salt",
    "cache_prompt": "prompts are always cached; use a cache_salt of its own to share nothing",
    "return_hidden_states return_pooled_hidden_states": "use /v1/embeddings",
    "return_meta_info return_cached_tokens_details return_spec_tokens_details timings_per_token return_progress "
    "verbose": "usage and /metrics have the figures",
    "return_prompt_token_ids return_tokens return_input_ids_in_sglext return_output_ids_in_sglext":
        "use return_token_ids",
    "return_prompt_text": "use /apply-template",
    "return_token_offsets": "use logprobs in /v1/completions, which has text_offset",
    "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 sampling_logprobs_mode return_sampling_mask "
    "post_sampling_probs": "use logprobs and top_logprobs, which come from the model's own distribution",
    "n_probs top_n_tokens": "use logprobs, and in chat top_logprobs",
    "prompt_logprob_token_ids prompt_logprob_start decoder_input_details details": "use prompt_logprobs",
    "skip_special_tokens": "the text has no special tokens; use logprobs or return_token_ids to see them",
    "return_full_text": "use echo in /v1/completions",
    "return_routed_experts routed_experts_start_len routed_experts_prompt_start return_weight_versions response_fields":
        "answers have the fields of the OpenAI API",
    "separate_reasoning reasoning_format": "start the server with --reasoning-parser none",
    "stream_reasoning": "streams always have the reasoning first; use include_reasoning: false to leave it out",
    "parse_tool_calls": "use tool_choice: none",
    "stream_interval": "a stream has each token as it comes",
    "repetition_detection": "use repetition_penalty, frequency_penalty or max_tokens",
    "watermark watermarking": "there are no watermarks",
    "repeat_penalty repeat_last_n penalize_nl penalty_prompt": "use repetition_penalty, which counts all tokens",
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers": _SAMPLER,
    "xtc_probability xtc_threshold typical_p mirostat mirostat_tau mirostat_eta top_n_sigma samplers": _SAMPLER,
    "min_keep dynatemp_range dynatemp_exponent adaptive_target adaptive_decay top_a tfs_z": _SAMPLER,
    "do_sample": "use temperature: 0 for the most likely tokens",
    "n_indent t_max_predict_ms t_max_prompt_ms": "use stop, stop_regex or max_tokens",
    "grammar_lazy grammar_triggers grammar_type preserved_tokens generation_prompt chat_format chat_parser "
    "reasoning_control reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tag "
    "reasoning_budget_end_tags tool_prompt": "the chat template determines them",
    "options": "put its fields at the top level, such as temperature and max_tokens",
    "format": "use response_format",
    "think": "use thinking, enable_thinking or reasoning_effort",
    "num_predict": "use max_tokens",
    "num_ctx num_keep num_batch num_gpu num_thread": "they are options of the server, see weft serve --help-all",
    "messages[].prefix": "use continue_final_message: true",
    "template raw": "use chat_template, or /v1/completions for a prompt without a template",
    "context": "send the whole conversation",
    "truncate": "use truncate_prompt_tokens",
    "shift n_keep n_discard options.num_keep": "this server never shifts the context",
    "options.typical_p options.tfs_z options.mirostat options.mirostat_tau options.mirostat_eta "
    "options.penalize_newline": _SAMPLER,
    "options.numa options.num_batch options.num_gpu options.main_gpu options.low_vram options.f16_kv "
    "options.num_thread options.use_mmap options.use_mlock": "it is set when the server starts",
    "options.logits_all": "use logprobs",
    "options.vocab_only options.embedding_only": "use /tokenize and /api/embed",
    "inputs": "use messages, prompt or input",
    "parameters": "put its fields at the top level",
    "previous_input_messages enable_response_messages": "use input, previous_response_id or conversation",
    "messages[].images image_data width height steps": _IMAGES,
    "images images_config mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs min_dynamic_patch "
    "max_dynamic_patch use_audio_in_video video_config task input_extra input_prefix input_suffix": _IMAGES,
    "audio modalities": _IMAGES,
    "suffix": "this server does not fill in the middle",
    "web_search_options mcp_servers": "run searches and tools in the client, and offer them as tools",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "_debug_render_only": "use /apply-template",
    "custom_labels": "use user",
    "embed_dtype endianness": "embeddings are little-endian float32; convert them in the client",
    "padding": "prompts need no padding",
    "rank_fields": "a document is one text; join the fields in the client",
    "max_chunks_per_doc": "use max_tokens_per_doc",
}  # fmt: skip
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (True,), "separate_reasoning": (True,), "stream_reasoning": (True,), "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"), "do_sample": (True,), "stream_interval": (1,), "id_slot": (-1,),
    "length_penalty": (1,), "modalities": ([], ["text"]), "function_call": (), "web_search_options": (), "audio": (),
    "n_probs": (0,), "skip_special_tokens": (True,),
    "penalize_nl": (True,), "repeat_penalty": (1,),
    "repeat_last_n": (0, 64, -1), "typical_p": (1,), "top_n_sigma": (-1, 0), "min_keep": (0, 1),
    "dry_multiplier": (0,), "dry_base": (1.75,), "dry_allowed_length": (2,), "dry_penalty_last_n": (-1, 0),
    "xtc_probability": (0,), "xtc_threshold": (0.1,), "mirostat": (0,), "mirostat_tau": (5,), "mirostat_eta": (0.1,),
    "dynatemp_range": (0,), "dynatemp_exponent": (1,), "adaptive_target": (-1,),
    "adaptive_decay": (0.9,), "n_keep": (0,), "n_discard": (0,), "options.num_keep": (0,),
    "dry_sequence_breakers": (["\n", ":", '"', "*"],), "options.tfs_z": (1,), "options.typical_p": (1,),
    "options.mirostat": (0,), "options.mirostat_tau": (5,), "options.mirostat_eta": (0.1,),
    "options.penalize_newline": (True,), "top_a": (0,), "tfs_z": (1,),
    "n_indent": (0,), "t_max_predict_ms": (-1, 0), "t_max_prompt_ms": (-1, 0), "embed_dtype": ("float32",),
    "endianness": ("native", "little"), "padding": (False, "do_not_pad"),
}  # fmt: skip
"""Values that ask for nothing. Other fields have none but false and empty values."""

_EMPTY: tuple[Any, ...] = (False, "", [], {})

REFUSED = {name: Refusal(why, _HARMLESS.get(name, _EMPTY)) for names, why in _GROUPS.items() for name in names.split()}
"""Fields that no endpoint supports, and what to do instead."""

INSTEAD = {
    ("/v1/responses", "prompt"): "stored prompts are not supported; send instructions and input",
    ("/v1/responses", "messages"): "use input",
    ("/v1/responses", "reasoning_effort"): "use reasoning.effort",
    ("/v1/responses", "logprobs"): "use top_logprobs, or include message.output_text.logprobs",
    ("/v1/responses", "truncate_prompt_tokens"): "use truncation: auto",
    ("/v1/rerank", "truncation"): "use truncate_prompt_tokens or max_tokens_per_doc",
    ("/v1/score", "truncation"): "use truncate_prompt_tokens or max_tokens_per_doc",
    ("/v1/messages", "stop"): "use stop_sequences",
    **{
        ("/v1/messages", name): "use thinking.budget_tokens"
        for name in ("max_thinking_tokens", *(name for name, to in ALIASES.items() if to == ("max_thinking_tokens",)))
    },
    ("/v1/messages", "parallel_tool_calls"): "use tool_choice.disable_parallel_tool_use",
    ("/v1/messages", "include_reasoning"): "use thinking",
    ("/v1/messages", "response_format"): "use output_config.format",
    ("/v1/messages", "structured_outputs"): "use output_config.format",
    ("/v1/messages", "reasoning_effort"): "use output_config.effort",
    ("/v1/messages", "enable_thinking"): "use thinking",
    ("/v1/chat/completions", "system"): "use a message of role system",
    ("/v1/chat/completions", "instructions"): "use a message of role system",
    ("/v1/chat/completions", "text"): "use response_format",
    ("/api/chat", "parallel_tool_calls"): "use /v1/chat/completions",
    ("/api/chat", "include_reasoning"): "use think",
    ("/api/chat", "truncate"): "prompts that do not fit are refused",
    ("/api/generate", "truncate"): "prompts that do not fit are refused",
    ("/api/generate", "template"): "start the server with --chat-template, or use raw",
    ("/api/generate", "context"): "use /api/chat",
    ("/v1/completions", "tools"): "use /v1/chat/completions",
}
"""Alternatives that an endpoint has to a refused field, or to a field of another endpoint."""

CONTENT = frozenset({"messages", "prompt", "input"})
"""Unless in `INSTEAD`, reported rather than refused: some clients send one body to several endpoints."""


class _Elsewhere(NamedTuple):
    paths: list[str]
    defaults: list[Any]


@cache
def _elsewhere() -> dict[str, _Elsewhere]:
    """The fields of the endpoints of OpenAI and Anthropic that compute answers: where they work, and their defaults."""
    found: dict[str, _Elsewhere] = {}
    kinds: list[type[Body]] = [Body]
    for kind in kinds:
        kinds += kind.__subclasses__()
        path = kind.__dict__.get("endpoint_path") or ""
        if path.startswith("/v1/"):
            for name, attribute in kind.attributes.items():
                paths, defaults = found.setdefault(name, _Elsewhere([], []))
                paths.append(path)
                defaults.append(kind.model_fields[attribute].get_default())
    return found


def _elsewhere_of(kind: type[Body], name: str) -> _Elsewhere | None:
    """Where a field that this body does not have works, under this or another name."""
    names = (name, *ALIASES.get(name, ())) if kind.endpoint_path else ()
    return next((found for each in names if (found := _elsewhere().get(each)) is not None), None)


def refusal(kind: type[Body], name: str, value: Any) -> str | None:
    """Why a body of this kind cannot have a field that it does not declare; None if it may."""
    if name in NO_EFFECT:
        return None
    if (known := REFUSED.get(name)) is not None:
        why = INSTEAD.get((kind.endpoint_path, name), known.why)
        return None if _is_any(value, known.harmless) else f"{name} is not supported: {why}."
    if (elsewhere := _elsewhere_of(kind, name)) is not None:
        instead = INSTEAD.get((kind.endpoint_path, name))
        switches_off = value is False and instead is not None and all(each is True for each in elsewhere.defaults)
        harmless = not switches_off and _is_any(value, (*_EMPTY, *elsewhere.defaults))
        if harmless or (instead is None and name in CONTENT):
            return None
        instead = instead or f"it works in {' and '.join(sorted(set(elsewhere.paths)))}"
        return f"{name} is not supported by {kind.endpoint_path}: {instead}."
    return None


def _is_any(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a JSON value is one of these; unlike in Python, 0 is not false."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def translated(kind: type[Body], data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A request with aliases renamed, and the aliases by their new names. Raises `ApiError` for refused fields."""
    aliases: dict[str, str] = {}
    for name, value in data.items():
        if name in kind.attributes or value is None or (name in NO_LIMIT and value == -1):
            continue
        target = next((target for target in ALIASES.get(name, ()) if target in kind.attributes), None)
        if target is not None:
            other = target if data.get(target) is not None else aliases.setdefault(target, name)
            if data[other] != value:
                raise bad_request(f"Give either {other} or {name}, which mean the same.", name)
        elif (why := refusal(kind, name, value)) is not None:
            raise bad_request(why, name, "unsupported_field")
    if not aliases:
        return data, aliases
    return {**data, **{target: data[name] for target, name in aliases.items()}}, aliases


def unknown_fields(body: Body, data: Any, at: str = "") -> Iterator[str]:
    """Paths of the fields of a validated request that are ignored, also those inside objects. Raises `ApiError` for
    refused ones inside objects."""
    for name, value in data.items():
        path = at + name
        if (attribute := body.attributes.get(name)) is not None:
            yield from _inside(getattr(body, attribute), value, path)
        elif value is None or path in NO_EFFECT or (not at and _is_known(type(body), name)):
            continue
        elif (why := refusal(Body, path, value)) is not None:
            raise bad_request(why, path, "unsupported_field")
        elif path not in REFUSED:
            yield path


def _is_known(kind: type[Body], name: str) -> bool:
    """Whether a field that passed `translated` is known: an alias, or one with a harmless value."""
    known = name in REFUSED or any(target in kind.attributes for target in ALIASES.get(name, ()))
    return known or (_elsewhere_of(kind, name) is not None and name not in CONTENT)


def _inside(value: Any, data: Any, path: str) -> Iterator[str]:
    if isinstance(value, Body) and isinstance(data, dict) and not value.keeps_unknown:
        yield from unknown_fields(value, data, f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body) and len(value) == len(data):  # none dropped
        for item, given in zip(value, data, strict=True):
            yield from _inside(item, given, f"{path}[]")


_logged: set[tuple[str, str]] = set()


def report(path: str, fields: list[str], *, strict: bool) -> str:
    """Log ignored fields the first time, and return the value of `IGNORED_HEADER`. Raises `ApiError` if `strict`."""
    if strict:
        what = f"Unknown field {clip(fields[0])!r}, which this server would ignore (--strict-fields)."
        raise bad_request(what, clip(fields[0]), "unknown_field")
    kept = sorted(set(fields))[:MAX_REPORTED]
    shown = [field.encode("ascii", "backslashreplace").decode()[:100] for field in kept]
    shown = ["".join(char if char.isprintable() and char != "," else "?" for char in field) for field in shown]
    for field in shown:
        if (path, field) not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add((path, field))
            logger.warning("%s ignores the unknown field %s", path, field)
    return ", ".join(shown)
