"""`DraftOptions`: how drafts are made, from `--speculation` or from vLLM's `--speculative-config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft.engine.config.paths import expanded
from weft.engine.errors import ConfigError, invalid_option

Method = Literal["suffix", "ngram", "draft_model", "eagle3", "mtp"]
MODEL_METHODS: tuple[Method, ...] = ("draft_model", "eagle3", "mtp")
Speculation = Literal["off", "auto", "suffix", "ngram"]
DEFAULT_DEPTHS: dict[Method, int] = {"suffix": 16, "ngram": 5, "draft_model": 4, "eagle3": 4, "mtp": 3}
LEAST_AGREEMENT = 0.1  # share of the occurrences that must agree with a draft, if depths are not measured
MOST_DRAFTS = 64  # maximum draft tokens of a request in one iteration


class DraftOptions(NamedTuple):
    """Options of the drafter."""

    method: Method
    depth: int
    """Maximum draft tokens of a request in one iteration."""
    measured: bool
    """Choose depths by measurement, instead of verifying as many drafts as there are."""
    shortest: int = 2
    """n-gram: tokens of the shortest match."""
    longest: int = 4
    """n-gram: tokens of the longest match."""
    factor: float = 2.0
    """Suffix: draft tokens per token of the match, at most."""
    least: float = 0.0
    """Suffix: share of the occurrences that must agree with a draft token."""
    reach: int = 256
    """Suffix: tokens of the match and the draft together, at most."""
    by_requests: tuple[tuple[int, int, int], ...] = ()
    """(from, to, depth): maximum depths while this many requests decode."""
    model: Path | None = None
    """Directory of the model that drafts; None: there is none, or the target's own layer drafts."""

    @property
    def by_model(self) -> bool:
        """Whether a model drafts. Otherwise drafts repeat the request's own text."""
        return self.method in MODEL_METHODS

    def depth_at(self, requests: int) -> int:
        """Return the maximum depth while this many requests decode."""
        for first, last, depth in self.by_requests:
            if first <= requests <= last:
                return min(depth, self.depth)
        return self.depth


_NO_CHOICE = "is not supported for models that draft"
_REFUSED = dict.fromkeys(
    (
        "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "revision",
        "code_revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch", "disable_eagle_block_drop",
        "use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting", "draft_load_config",
        "dspark_draft_topk", "tensor_parallel_size",
    ),
    _NO_CHOICE,
) | {
    "enforce_eager": "use --enforce-eager",
    "synthetic_acceptance_rates": "weft never accepts a token that the model would not sample",
    "synthetic_acceptance_length": "weft never accepts a token that the model would not sample",
    "fly_config": "weft never accepts a token that the model would not sample",
}  # fmt: skip
"""Keys of vLLM's that are refused, and why. A null or a false asks for nothing."""

_METHODS = "suffix, ngram, draft_model, eagle3 or mtp"
_Depth = Annotated[int, Field(ge=1, le=MOST_DRAFTS)]
_Range = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class _Given(BaseModel):
    """The keys of vLLM's that weft supports."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: _Depth | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2)] = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    draft_sample_method: Literal["greedy"] = "greedy"
    rejection_sample_method: Literal["standard"] = "standard"
    num_speculative_tokens_per_batch_size: list[_Range] | None = Field(
        None, title="a list of [from, to, tokens], whole numbers of 0 or more"
    )
    enable_adaptive_verification: bool | None = None

    @model_validator(mode="after")
    def _keys_fit(self) -> _Given:
        named = self.named
        if named is None:
            raise ValueError(f"method is missing: {_METHODS}")
        if named not in DEFAULT_DEPTHS:
            raise ValueError(f"method {named[:40]!r} is not supported: choose {_METHODS}")
        if named in MODEL_METHODS:
            self._model_fits(named)
        elif self.model is not None and self.model.strip("[]") != named:
            raise ValueError(f"model: method {named} has no draft model")
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ValueError("draft_tensor_parallel_size must be 1")
        if self.suffix_decoding_max_cached_requests:
            raise ValueError(
                "suffix_decoding_max_cached_requests must be 0: drafts come from the request's own text only"
            )
        if named == "ngram" and self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens is missing")
        low, high = self.lookup
        if low > high:
            raise ValueError(f"prompt_lookup_min {low} is more than prompt_lookup_max {high}")
        return self

    def _model_fits(self, method: str) -> None:
        if method == "mtp":
            if self.model is not None and self.model.strip("[]") != method:
                raise ValueError("model: method mtp uses a layer of the served model")
        elif self.model is None:
            raise ValueError(f"model is missing: the directory of the {method}")
        if given := sorted(name for name in self.model_fields_set if name.startswith(("prompt_", "suffix_"))):
            raise ValueError(f"{given[0]}: method {method} does not search text")

    @property
    def named(self) -> str | None:
        """The method; vLLM also takes its name as the model, in brackets or not."""
        return self.method or (None if self.model is None else self.model.strip("[]"))

    @property
    def lookup(self) -> tuple[int, int]:
        """The shortest and the longest match, with vLLM's defaults."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 5, 5
        return (high if low is None else low) or 1, (low if high is None else high) or 1


def parse_config(text: str) -> DraftOptions:
    """Return the options of a `--speculative-config`. Raises `ConfigError`, one line."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError('it is not a JSON object, such as {"method": "suffix"}')
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if (why := _REFUSED.get(name)) is not None:
            if value is not None and value is not False:
                raise ConfigError(f"{name} {why}" if why == _NO_CHOICE else f"{name}: {why}")
        elif value is not None:
            kept[name] = value
    try:
        given = _Given.model_validate(kept)
    except ValidationError as error:
        raise ConfigError(": ".join(filter(None, invalid_option(error, _Given)))) from None
    method = next(each for each in DEFAULT_DEPTHS if each == given.named)
    by_requests = tuple(
        (first, last, depth) for first, last, depth in given.num_speculative_tokens_per_batch_size or ()
    )
    if method in MODEL_METHODS:
        depth = given.num_speculative_tokens or DEFAULT_DEPTHS[method]
        measured = given.enable_adaptive_verification is not False
        model = None if method == "mtp" else expanded(given.model or "")
        return DraftOptions(method, depth, measured, by_requests=by_requests, model=model)
    low, high = given.lookup
    tree = given.suffix_decoding_max_tree_depth
    return DraftOptions(
        method,
        given.num_speculative_tokens or min(tree, MOST_DRAFTS),
        bool(given.enable_adaptive_verification),
        low,
        high,
        given.suffix_decoding_max_spec_factor,
        given.suffix_decoding_min_token_prob,
        tree,
        by_requests,
    )


def draft_options(speculation: Speculation, depth: int | None, config: str | None) -> DraftOptions | None:
    """Return the options of the drafter; None if speculation is off. Raises `ConfigError` if `config` is invalid."""
    if config is not None:
        return parse_config(config)
    if speculation == "off":
        return None
    method: Method = "ngram" if speculation == "ngram" else "suffix"
    measured = speculation == "auto"
    return DraftOptions(method, depth or DEFAULT_DEPTHS[method], measured, least=0.0 if measured else LEAST_AGREEMENT)
