"""`kept_bounds`: replaces number bounds of a JSON schema that llguidance would not enforce.

llguidance reads bounds as doubles, and whole ones as 64-bit integers. It also lets an excluded whole bound through if
the other bound has the same whole part: for numbers above 0 and up to 0.5 it accepts 0. The replacements are slightly
stricter.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeGuard

from weft.engine.errors import RequestError
from weft.engine.wire.json_schemas import Schema, mapped

MOST = 2**63 - 1024  # the largest whole number that is both a double and a signed 64-bit integer
EXACT = 2**53  # above this, not every whole number is a double
TINY = 1e-60  # replaces an excluded 0
DIGITS = 15  # digits of a decimal that all parsers of doubles read alike


def kept_bounds(schema: Schema) -> Schema:
    """Return a schema whose values all satisfy the given one. Raises `RequestError` for a bound so far from 0 that no
    number beyond it can be written."""
    # Any two bounds of the schema may apply together, through allOf, $ref and others.
    near: dict[int, set[int]] = {1: set(), -1: set()}

    def collect(part: Schema) -> Schema:
        for sign, (included, excluded) in _SIDES.items():
            for value in (part.get(included), part.get(excluded)):
                if _is_number(value) and value % 1:
                    near[-sign].add(-sign * math.trunc(value))
        return part

    mapped(schema, collect)

    def change(part: Schema) -> Schema:
        for sign in _SIDES:
            part = _inside(part, sign, near[sign])
        return part

    changed: Schema = mapped(schema, change)
    return changed


_SIDES = {1: ("minimum", "exclusiveMinimum"), -1: ("maximum", "exclusiveMaximum")}


def _inside(part: Schema, sign: int, near: set[int]) -> Schema:
    """Replace the bounds of one side. All values are multiplied by `sign`, so that bounds are lower bounds. `near` are
    whole parts of bounds of the other side."""
    included, excluded = _SIDES[sign]
    given: list[tuple[float, bool]] = []
    if _is_number(part.get(included)):  # in draft 4 a boolean marks it as excluded
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
    """Return a replacement of a lower bound, and whether it is excluded."""
    if abs(value) >= EXACT:
        value = max(value, -MOST)
        double = float(value)
        # Beyond `EXACT` the library writes the shortest digits that identify a double, followed by zeros.
        while (least := min(int(double), int(Decimal(repr(double))))) < value or (excluded and least == value):
            double = math.nextafter(double, math.inf)
        if double > MOST:
            raise RequestError(f"the bound {value} cannot be enforced: it exceeds {MOST}", "grammar")
        return int(double), False
    if not excluded or value not in near or value < 0:
        return value, excluded
    places = max(0, DIGITS - len(str(int(value))))
    return (round(value + 10.0**-places, places) if value else TINY), False


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
