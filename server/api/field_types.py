"""Field types of request bodies: the accepted forms, their bounds and their schema."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from weft.engine.wire.sampling import BOUNDS, MAX_LOGIT_BIAS, MAX_LOGPROB_IDS
from weft.server.api.media.parts import IMAGE_KINDS, ImagePart, read_part
from weft.server.errors import clip
from weft.server.text.stop_regex import StopPatterns

MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # inputs per embeddings request, as at OpenAI
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_PARTS = 8192  # content parts per message
INT32 = 2**31 - 1
_BIAS = BOUNDS["logit_bias"]
_PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def bounded(name: str, default: Any = ..., *, le: int | None = None) -> Any:
    """A field with the bounds of the sampling field `name`. `le`: its upper bound if the engine sets none."""
    bounds = BOUNDS[name]
    return Field(default, ge=bounds.ge, gt=bounds.gt, le=bounds.le if le is None else le)


def _parse_prompts(value: Any, most: int = MAX_PROMPTS) -> list[str] | list[list[int]]:
    """Parse the four forms of `prompt`. Written by hand because a pydantic union is slow on long id lists."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list):
        prompts = [value] if value and set(map(type, value)) == {int} else value
    else:
        raise ValueError(_PROMPT_FORMS)
    if not prompts or any(prompt in ("", []) for prompt in prompts):
        raise ValueError("must not be empty")
    if len(prompts) > most:
        raise ValueError(f"must have at most {most} entries, not {len(prompts)}")
    kinds = set(map(type, prompts))
    if kinds == {str} or (kinds == {list} and all(set(map(type, prompt)) == {int} for prompt in prompts)):
        return prompts
    raise ValueError(_PROMPT_FORMS)


def _parse_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} entries")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"entries must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _parse_stop_regex(value: Any) -> StopPatterns | None:
    if isinstance(value, StopPatterns):
        return value
    return StopPatterns(patterns) if (patterns := _parse_stop(value)) else None


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10)):
            raise ValueError(f"keys must be token ids, not {clip(key)!r}")
        if type(number) not in (int, float) or not _BIAS.hold(number):
            raise ValueError(f"values must be numbers {_BIAS.rule}")
        bias[int(key)] = float(number)
    return bias


_TEXT_KINDS = ("text", "input_text", "output_text")
_TEXT_FIELDS = dict.fromkeys(_TEXT_KINDS, "text") | {"refusal": "refusal", "thinking": "thinking"}
"""Types of text parts, and the field that holds the text."""


def flatten_content(value: Any, images: list[ImagePart] | None = None) -> str:
    """Content as one string. Neighboring texts are joined with newlines, and images become marks; their parts are
    appended to `images`. None: images are not allowed here."""
    if isinstance(value, str):
        return value
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts")
    out: list[str] = []
    after_text = False
    for i, part in enumerate(value):
        is_image = isinstance(part, dict) and part.get("type") in IMAGE_KINDS
        if not is_image:
            text = _part_text(part)
            out += ["\n", text] if after_text else [text]
        elif images is None:
            raise ValueError("images are supported only in messages of users and tools")
        else:
            images.append(image := read_part(part, i))
            out.append(image.mark)
        after_text = not is_image
    return "".join(out)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValueError(f"a part of type {clip(kind)!r} is not supported: this server takes text and images")
    if not isinstance(part.get(field), str):
        raise ValueError(f"a part of type {kind} needs a string {field!r}")
    return part[field]


def _nonempty(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1} | ({} if most is None else {"maxItems": most})


def given(name: str) -> dict[str, Any]:
    """The schema of an object in which this field is not null."""
    return {"properties": {name: {"not": {"type": "null"}}}, "required": [name]}


def _prompt_schema(most: int) -> WithJsonSchema:
    lists = _nonempty(_TEXT, most), _nonempty(_ID), _nonempty(_nonempty(_ID), most)
    return WithJsonSchema({"anyOf": [_TEXT, *lists]})


def _part_schema(kind: dict[str, Any], field: str, required: list[str]) -> dict[str, Any]:
    """The schema of a content part with its text in `field`."""
    return {"type": "object", "properties": {"type": kind, field: {"type": "string"}}, "required": required}


_TEXT = {"type": "string", "minLength": 1}
_ID = {"type": "integer", "minimum": 0, "maximum": INT32}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXT_PART = {
    "anyOf": [
        {"type": "string"},
        _part_schema({"enum": [*_TEXT_KINDS]}, "text", ["text"]),
        *(_part_schema({"const": kind}, kind, ["type", kind]) for kind in ("refusal", "thinking")),
    ]
}

Prompts = Annotated[list[str] | list[list[int]], PlainValidator(_parse_prompts), _prompt_schema(MAX_PROMPTS)]
Inputs = Annotated[
    list[str] | list[list[int]], PlainValidator(partial(_parse_prompts, most=MAX_INPUTS)), _prompt_schema(MAX_INPUTS)
]
_STOP_SCHEMA = WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]})
Stop = Annotated[list[str], PlainValidator(_parse_stop), _STOP_SCHEMA]
StopRegex = Annotated[StopPatterns | None, PlainValidator(_parse_stop_regex), _STOP_SCHEMA]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": _BIAS.ge, "maximum": _BIAS.le},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
_URL = {"type": "string", "minLength": 1}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "anyOf": [
                _URL,
                {
                    "type": "object",
                    "properties": {"url": _URL, "detail": {"enum": ["auto", "low", "high"]}},
                    "required": ["url"],
                },
            ]
        },
    },
    "required": ["type", "image_url"],
}
_PART = {"anyOf": [*_TEXT_PART["anyOf"], _IMAGE_PART]}
Content = Annotated[
    str,
    PlainValidator(flatten_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "maxItems": MAX_PARTS}]}),
]
"""The content of a message. `ChatMessage` takes images out before."""
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Priority = Annotated[int, Field(ge=-INT32, le=INT32)]
CacheSalt = Annotated[str, Field(max_length=128, pattern=r"^[^\x00-\x1f]*$")]
CacheKey = Annotated[str, Field(max_length=1024)]


def _parse_ids(value: Any, least: int = 0, most: int | None = None) -> list[int]:
    """Written by hand for speed, like `_parse_prompts`."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be a list of token ids")
    if len(value) < least or (most is not None and len(value) > most):
        raise ValueError(f"must have at {'most' if most is not None else 'least'} {most or least} token ids")
    if value and not (min(value) >= 0 and max(value) <= INT32):
        raise ValueError(f"token ids must be between 0 and {INT32}")
    return value


def _ids_schema(**limits: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": _ID, **limits})


SomeTokenIds = Annotated[list[int], PlainValidator(partial(_parse_ids, least=1)), _ids_schema(minItems=1)]
LogprobIds = Annotated[
    list[int], PlainValidator(partial(_parse_ids, most=MAX_LOGPROB_IDS)), _ids_schema(maxItems=MAX_LOGPROB_IDS)
]
TokenIds = Annotated[list[int], PlainValidator(_parse_ids), _ids_schema()]
"""Any number of ids; the endpoint checks them against the vocabulary."""
