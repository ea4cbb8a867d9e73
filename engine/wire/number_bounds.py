"""`kept_bounds`: a JSON schema with bounds of numbers that llguidance keeps, where it would not keep those given.

It reads bounds as doubles, whole ones as 64 bits. And a bound that is whole and excluded is let through when the other
one has the same whole part: above 0, up to 0.5, it takes 0. What stands in their place allows a little less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeGuard

from weft.engine.errors import RequestError

MOST = 2**63 - 1024
"""the largest whole number that is a double and has 64 bits with its sign"""
EXACT = 2**53
"""from here on not every whole number is a double"""
TINY = 1e-60
"""in place of an excluded 0"""
DIGITS = 15
"""of a decimal that every reader of doubles reads alike"""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""keywords whose values are no schemas"""
_NAMES = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""keywords whose keys are none"""

Schema = dict[str, Any]


def kept_bounds(schema: Schema) -> Schema:
    """Every value that follows the new schema follows the one given. Raises `RequestError` for a bound so far from 0
    that no number beyond it can be written."""
    # Bounds meet through allOf, $ref and others: any two in the schema may.
    near: dict[int, set[int]] = {1: set(), -1: set()}

    def collect(part: Schema) -> Schema:
        for sign, (included, excluded) in _SIDES.items():
            for value in (part.get(included), part.get(excluded)):
                if _is_number(value) and value % 1:
                    near[-sign].add(-sign * math.trunc(value))
        return part

    _mapped(schema, collect)

    def change(part: Schema) -> Schema:
        for sign in _SIDES:
            part = _inside(part, sign, near[sign])
        return part

    changed: Schema = _mapped(schema, change)
    return changed


_SIDES = {1: ("minimum", "exclusiveMinimum"), -1: ("maximum", "exclusiveMaximum")}


def _mapped(node: Any, change: Callable[[Schema], Schema], names: bool = False) -> Any:
    """With every schema inside changed. names: the node's keys are names of schemas."""
    if isinstance(node, list):
        return [_mapped(item, change) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: _mapped(value, change) for key, value in node.items()}
    inner = {k: v if k in _DATA else _mapped(v, change, k in _NAMES) for k, v in node.items()}
    return change(inner)


def _inside(part: Schema, sign: int, near: set[int]) -> Schema:
    """near: whole parts of bounds from the other side, times `sign`, as all bounds are here: they are lower ones."""
    included, excluded = _SIDES[sign]
    given: list[tuple[float, bool]] = []
    if _is_number(part.get(included)):  # draft 4 says in a word that it is excluded
        given.append((sign * part[included], part.get(excluded) is True))
    if _is_number(part.get(excluded)):
        given.append((sign * part[excluded], True))
    moved = [_moved(value, beyond, near) for value, beyond in given]
    if moved == given:
        return part
    value, beyond = max(moved)
    rest = {k: v for k, v in part.items() if k not in (included, excluded)}
    return {**rest, excluded if beyond else included: sign * value}


def _moved(value: float, excluded: bool, near: set[int]) -> tuple[float, bool]:
    """A lower bound in place of this one, and whether it is excluded itself."""
    if abs(value) >= EXACT:
        value = max(value, -MOST)
        double = float(value)
        # Of a double beyond `EXACT` the library writes the digits that tell it from others, and zeros.
        while (least := min(int(double), int(Decimal(repr(double))))) < value or (excluded and least == value):
            double = math.nextafter(double, math.inf)
        if double > MOST:
            raise RequestError(f"numbers beyond {MOST} cannot be enforced, as a bound asks ({value})", "grammar")
        return int(double), False
    if not excluded or value not in near or value < 0:
        return value, excluded
    places = max(0, DIGITS - len(str(int(value))))
    return (round(value + 10.0**-places, places) if value else TINY), False


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
