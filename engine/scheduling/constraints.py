"""What the scheduler asks of the constraints on requests in its slots: may they decode, what may come, and what came.

A constraint is a grammar, words that must not occur, tokens that alone may come, a bound on thinking, or several of
these. Tokens alone need no look at the output; a request with one of the others waits for its newest token, one that
thinks only near its bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.scheduling.bad_words import without
from weft.engine.scheduling.grammar import Grammar, Mask
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import Finish

STUCK = "allowed_token_ids, bad_words and the structured output leave no token between them"


def may_decode(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Rows of `slots` that can be launched again: nothing in them depends on the last token, or that is known."""
    free = ~s.constrained[slots]
    for i in np.flatnonzero(~free).tolist():
        request, in_flight = _request(s, slots[i]), int(s.in_flight[slots[i]])
        if request.follows_output or request.thinking is None:
            free[i] = in_flight == 0 and (request.grammar is None or request.grammar.ready)
        else:
            free[i] = in_flight == 0 or request.thinking.may_run_ahead(in_flight)
    return free


def masks(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`[n, ceil(V / 32)]`: what may come next in these slots."""
    return np.stack([_mask(_request(s, slot)) for slot in slots.tolist()])


def _mask(request: Request) -> Mask:
    mask = request.allowed
    if request.grammar is not None:
        mask = request.grammar.allowed() if mask is None else request.grammar.allowed() & mask
    if (bound := request.thinking) is not None and bound.mask is not None:
        forced = bound.mask if mask is None else bound.mask & mask
        if forced.any():
            return forced
        bound.give_up()
        if mask is None:
            return np.full_like(forced, -1)
    assert mask is not None
    if request.bad_words is not None:
        mask = without(mask, request.bad_words.banned(request.words_state))
    if not mask.any():
        # Something must be sampled; what it is is not told.
        request.stuck = True
        mask = ~mask
    return mask


def advance(
    s: SlotTable, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], finish: npt.NDArray[np.uint8]
) -> dict[int, str]:
    """Tell constraints their requests' new tokens; requests whose grammar is at its end stop (`finish` is written, and
    `tokens` where one must not be told).

    Returns errors by handle: of grammars that went beyond a limit while they ran, of constraints that left nothing.
    """
    errors: dict[int, str] = {}
    going: list[Grammar] = []
    for i in np.flatnonzero(s.constrained[slots]).tolist():
        request, token = _request(s, slots[i]), int(tokens[i])
        if finish[i] == Finish.NONFINITE:
            continue
        if request.stuck:
            finish[i], tokens[i] = Finish.REFUSED, -1
            errors[request.handle] = STUCK
            continue
        if request.thinking is not None:
            request.thinking.see(token)
            s.constrained[slots[i]], s.masked[slots[i]] = request.constrained, request.masked
        if request.bad_words is not None:
            request.words_state = request.bad_words.after(request.words_state, token)
        if (grammar := request.grammar) is None:
            continue
        matcher = grammar.matcher
        if not finish[i] and matcher.consume_token(token) and not matcher.is_stopped():
            going.append(grammar)
        elif matcher.is_error():
            finish[i] = Finish.REFUSED
            errors[request.handle] = f"the grammar failed: {' '.join(matcher.get_error().split())}"[:300]
        elif not finish[i]:
            finish[i] = Finish.STOP
    if going:
        going[0].compute(going)
    return errors


def _request(s: SlotTable, slot: int) -> Request:
    request = s.request[slot]
    assert request is not None
    return request
