"""Constraints of requests in slots: which slots may decode, which tokens are allowed, and updates with new tokens.

A constraint is a grammar, bad words, allowed tokens, a bound on thinking, or several of these. Allowed tokens do not
depend on the output. A request with one of the others waits for its newest token; with bounded thinking, only near the
bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def masks(s: SlotTable, slots: npt.NDArray[np.int32], of_drafts: Mapping[int, Sequence[Mask]]) -> npt.NDArray[np.int32]:
    """Return the masks `[n, ceil(V / 32)]` of the next tokens of these slots. A slot with drafts occurs once for each
    of its positions, and its masks are given by slot (`with_drafts`)."""
    if not of_drafts:
        return np.stack([_mask(s.of(slot)) for slot in slots.tolist()])
    given = {slot: iter(masks) for slot, masks in of_drafts.items()}
    return np.stack([next(given[slot]) if slot in given else _mask(s.of(slot)) for slot in slots.tolist()])


def room(request: Request, most: int) -> int:
    """Return how many drafts a request may have, at most `most`: a bound on thinking must not act between them."""
    bound = request.thinking
    return most if bound is None or bound.settled else min(most, bound.ahead)


def forced(request: Request, most: int) -> list[int]:
    """Return the tokens, at most `most`, that a request's grammar hardly leaves a choice about."""
    if request.grammar is None or not most:
        return []
    return request.grammar.matcher.compute_ff_tokens()[:most]


def with_drafts(requests: Sequence[tuple[Request, Sequence[int]]]) -> list[list[Mask]]:
    """Return the masks of each request's next tokens: of the one before its drafts, then of those after each draft. A
    list ends before the first position at which no token is allowed or known; drafts after its masks cannot be
    verified. All requests are masked."""
    grammars = [(request.grammar, drafts) for request, drafts in requests if request.grammar is not None]
    computed = iter(grammars[0][0].compute_ahead(grammars) if grammars else ())
    return [
        _positions(request, drafts, next(computed) if request.grammar is not None else None)
        for request, drafts in requests
    ]


def _positions(request: Request, drafts: Sequence[int], of_grammar: Sequence[Mask] | None) -> list[Mask]:
    masks = [_mask(request)]
    if request.stuck:
        return masks
    state = request.words_state
    for i, draft in enumerate(drafts, 1):
        if of_grammar is not None and i >= len(of_grammar):
            break
        mask = request.allowed
        if of_grammar is not None:
            mask = of_grammar[i] if mask is None else of_grammar[i] & mask
        assert mask is not None
        if request.bad_words is not None:
            state = request.bad_words.after(state, draft)
            mask = without(mask, request.bad_words.banned(state))
        if not mask.any():
            break  # if this draft is right, the next iteration ends the request
        masks.append(mask)
    return masks


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
    """Update constraints with new tokens; a slot occurs once for each of its tokens. Requests whose grammar ends stop:
    `finish` is written, and `tokens` where a token must not be reported. A slot's tokens after its end are ignored.
    Returns errors by handle: grammars that exceeded a limit, and constraints that allowed no token."""
    errors: dict[int, str] = {}
    going: dict[Grammar, None] = {}
    ended = -1
    for i in np.flatnonzero(s.constrained[slots]).tolist():
        request, token = s.of(slots[i]), int(tokens[i])
        if finish[i] == Finish.NONFINITE or request.handle == ended:
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
            going[grammar] = None
            continue
        going.pop(grammar, None)
        ended = request.handle
        if matcher.is_error():
            finish[i] = Finish.REFUSED
            errors[request.handle] = f"the grammar failed: {' '.join(matcher.get_error().split())}"[:300]
        elif not finish[i]:
            finish[i] = Finish.STOP
    if going:
        next(iter(going)).compute(list(going))
    return errors
