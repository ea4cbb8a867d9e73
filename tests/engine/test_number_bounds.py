"""Bounds of numbers in JSON schemas: the grammar accepts only numbers that satisfy the schema, judged by another
library."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.engine.wire.number_bounds import kept_bounds

TOKENIZER = LLTokenizer("byte")
WHOLE = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**16), 10**16),
    st.sampled_from([sign * (2**power + near) for sign in (1, -1) for power in (53, 62) for near in (-1, 0, 1)]),
)
BOUND = st.one_of(
    WHOLE,
    st.builds(lambda whole, part: float(whole + part), st.integers(-3, 3), st.sampled_from([0.5, 0.25, 0.05, 0.999])),
)
SIDES = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUND)
)


def matcher(schema: dict[str, Any]) -> LLMatcher | None:
    """None if the schema is refused."""
    try:
        found = LLMatcher(TOKENIZER, grammar_text.json_schema(schema), limits=grammar_text.LIMITS)
    except RequestError:
        return None
    return None if found.is_error() else found


def accepts(start: LLMatcher, text: str) -> bool:
    tokens, copy = TOKENIZER.tokenize_str(text), start.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def near(bound: float) -> set[str]:
    """A bound in several notations, and the numbers around it."""
    at = Decimal(str(bound))
    numbers = {at + Decimal(step) for step in ("0", "1", "-1", "0.01", "-0.01", "0.25", "-0.25")}
    texts = {format(number, "f") for number in (*numbers, *map(round, numbers))}
    return texts | {f"{text}.0" for text in texts if "." not in text} | {f"{text}0" for text in texts if "." in text}


@pytest.mark.parametrize("joined", [False, True])
@given(st.data())
@settings(deadline=None, max_examples=150)
def test_numbers_that_the_grammar_accepts_satisfy_the_schema(joined: bool, data: st.DataObject) -> None:
    bounds = data.draw(SIDES)
    kind = {"type": data.draw(st.sampled_from(["number", "integer"]))}
    schema = {**kind, "allOf": [{name: value} for name, value in bounds.items()]} if joined else {**kind, **bounds}
    start = matcher(schema)
    if start is None:
        return
    # Parsed exactly: doubles would merge a bound with the numbers next to it.
    valid = Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal)).is_valid
    for text in set().union({"0", "-0", "0.1"}, *map(near, bounds.values())):
        assert not accepts(start, text) or valid(json.loads(text, parse_float=Decimal)), (schema, text)


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": 41, "maximum": 41.5},
        {"exclusiveMinimum": -41.5, "exclusiveMaximum": -41},
        {
            "minimum": 41,
            "exclusiveMinimum": True,
            "maximum": 41.5,
            "$schema": "http://json-schema.org/draft-04/schema#",
        },
    ],
)
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"$ref": "#/$defs/default", "$defs": {"default": s}}])
def test_an_excluded_whole_bound_is_kept_and_numbers_between_are_not_lost(bounds: dict[str, Any], wrap: Any) -> None:
    start = matcher(wrap({"type": "number", **bounds}))
    assert start is not None
    sides = [value for value in bounds.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    whole, middle = next(str(value) for value in sides if value % 1 == 0), str(sum(sides) / 2)
    assert not accepts(start, whole)
    assert not accepts(start, f"{whole}.0")
    assert accepts(start, middle)
    assert accepts(start, f"{middle}1")


def test_bounds_beyond_64_bits_are_clamped_or_refused_by_name() -> None:
    for kind in ("integer", "number"):
        for most in (2**63 - 1, 2**64 - 1, 1e30):
            start = matcher({"type": kind, "minimum": -most, "maximum": most})
            assert start is not None
            assert accepts(start, "-123456789012345678")
            assert accepts(start, "9223372036854770000")
        for schema in ({"minimum": 1e30}, {"maximum": -1e30, "minimum": -1e31}, {"exclusiveMinimum": 2**63}):
            with pytest.raises(RequestError, match="cannot be enforced"):
                grammar_text.json_schema({"type": kind, **schema})


def test_a_schema_without_such_bounds_is_unchanged() -> None:
    data = {"exclusiveMinimum": 0, "maximum": 0.5}
    schema = {
        "properties": {"n": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "minimum": {"const": data}},
        "required": ["n"],
        "default": data,
        "maxItems": 2**60,
    }
    assert kept_bounds(schema) == schema
