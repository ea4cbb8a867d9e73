"""Constraints of requests in slots: which slots may decode, which tokens are allowed, and updates with new tokens.

A constraint is a grammar, bad words, allowed tokens, a bound on thinking, or several of these. Allowed tokens do not
depend on the output. A request with one of the others waits for its newest token; with bounded thinking, only near the
bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.scheduling.bad_words import without
from weft.engine.scheduling.grammar import Grammar, Mask
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import Finish

STUCK = "allowed_token_ids, bad_words and the structured output together allow no token"


def may_decode(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return the rows of `slots` that can be launched: those whose constraints do not depend on unknown tokens."""
    free = ~s.constrained[slots]
    for i in np.flatnonzero(~free).tolist():
        request, in_flight = s.of(slots[i]), int(s.in_flight[slots[i]])
        if request.follows_output or request.thinking is None:
            free[i] = in_flight == 0 and (request.grammar is None or request.grammar.ready)
        else:
            free[i] = in_flight == 0 or request.thinking.may_run_ahead(in_flight)
    return free


def masks(s: SlotTable, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the masks `[n, ceil(V / 32)]` of the next tokens of these slots."""
    return np.stack([_mask(s.of(slot)) for slot in slots.tolist()])


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
        # A token must be sampled; it is not reported.
        request.stuck = True
        mask = ~mask
    return mask


def advance(
    s: SlotTable, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], finish: npt.NDArray[np.uint8]
) -> dict[int, str]:
    """Update constraints with new tokens. Requests whose grammar ends stop: `finish` is written, and `tokens` where a
    token must not be reported. Returns errors by handle: grammars that exceeded a limit, and constraints that allowed
    no token."""
    errors: dict[int, str] = {}
    going: list[Grammar] = []
    for i in np.flatnonzero(s.constrained[slots]).tolist():
        request, token = s.of(slots[i]), int(tokens[i])
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
