"""What the scheduler asks of the grammars in its slots: may they decode, what may come, and what came."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.scheduling.grammar import Grammar
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import Finish


def may_decode(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Rows of `slots` that can be launched again: no grammar, or one that knows the last token and its mask."""
    free = ~s.constrained[slots]
    for i in np.flatnonzero(~free).tolist():
        free[i] = s.in_flight[slots[i]] == 0 and _grammar(s, slots[i]).ready
    return free


def masks(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`[n, ceil(V / 32)]`: what the grammars in these slots allow next."""
    return np.stack([_grammar(s, slot).allowed() for slot in slots.tolist()])


def advance(
    s: SlotTable, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], finish: npt.NDArray[np.uint8]
) -> dict[int, str]:
    """Tell grammars their requests' new tokens; requests whose grammar is at its end stop (`finish` is written).

    Returns errors by handle, for grammars that went beyond a limit while they ran.
    """
    errors: dict[int, str] = {}
    going: list[Grammar] = []
    for i in np.flatnonzero(s.constrained[slots]).tolist():
        grammar = _grammar(s, slots[i])
        matcher = grammar.matcher
        if not finish[i] and matcher.consume_token(int(tokens[i])) and not matcher.is_stopped():
            going.append(grammar)
        elif matcher.is_error():
            finish[i] = Finish.REFUSED
            errors[int(s.handle[slots[i]])] = f"the grammar failed: {' '.join(matcher.get_error().split())}"[:300]
        elif not finish[i]:
            finish[i] = Finish.STOP
    if going:
        going[0].compute(going)
    return errors


def _grammar(s: SlotTable, slot: int) -> Grammar:
    request = s.request[slot]
    assert request is not None
    assert request.grammar is not None
    return request.grammar
