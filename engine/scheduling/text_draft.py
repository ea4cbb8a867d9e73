"""Drafts from a request's own text: what followed its last tokens where the same tokens occurred before.

There is no index. One comparison finds the last token in the whole text. Nothing is kept from one draft to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.engine.runner.iteration.batch import I32

LONGEST_MATCH = 16
"""Tokens beyond which a match counts as no better."""
MOST_SCANNED = 1024  # occurrences of the last token whose matches are measured
MOST_FOLLOWED = 64  # occurrences whose continuations vote, those with the longest matches
WEIGHT = 8.0
"""Factor of an occurrence's vote for each token that its match is longer."""


class TextDraft(NamedTuple):
    """A draft and what is known about it."""

    tokens: list[int]
    agreement: list[float]
    """Share of the votes for each token, of the occurrences that agree with all tokens before it."""
    match: int
    """Tokens of the longest match."""
    source: int
    """Position in the text of the first token of the occurrence that decided the first draft token."""


NO_DRAFT = TextDraft([], [], 0, -1)


def _occurrences(text: I32, longest: int) -> tuple[I32, I32]:
    """Return where the last tokens occurred before, as positions of the next token, ascending, and the length of each
    match, up to `longest`."""
    n = len(text)
    at = np.flatnonzero(text[:-1] == text[-1]) + 1
    back = 2
    while len(at) > MOST_SCANNED and back <= longest:
        at = at[np.searchsorted(at, back) :]
        narrower = at[text[at - back] == text[n - back]]
        if not len(narrower):
            break
        at, back = narrower, back + 1
    at = at[-MOST_SCANNED:]
    width = min(longest, n - 1)
    offsets = np.arange(1, width + 1)
    positions = at[:, None] - offsets
    same = (text[positions] == text[n - offsets]) & (positions >= 0)
    return at.astype(np.int32), np.logical_and.accumulate(same, 1).sum(1).astype(np.int32)


def suffix_draft(text: I32, most: int, *, least: float = 0.0, factor: float = 2.0, reach: int = 256) -> TextDraft:
    """Draft up to `most` tokens, no more than `factor` for each token of the longest match, and no more than `reach`
    together with the match. Occurrences vote for the next token; a draft ends where its share of the votes falls below
    `least`."""
    if len(text) < 2 or most < 1:
        return NO_DRAFT
    at, lengths = _occurrences(text, LONGEST_MATCH)
    if not len(at):
        return NO_DRAFT
    if len(at) > MOST_FOLLOWED:
        kept = np.sort(np.argsort(lengths, kind="stable")[-MOST_FOLLOWED:])
        at, lengths = at[kept], lengths[kept]
    match = int(lengths.max())
    most = min(most, int(factor * match), reach - match)
    votes = np.power(WEIGHT, lengths - match).tolist()
    return _followed(text, list(zip(at.tolist(), votes, strict=True)), match, most, least)


def _followed(text: I32, going: list[tuple[int, float]], match: int, most: int, least: float) -> TextDraft:
    """Follow the occurrences `(position, votes)` with the majority."""
    n = len(text)
    tokens: list[int] = []
    agreement: list[float] = []
    share, source = 1.0, -1
    for step in range(most):
        votes: dict[int, float] = {}
        followed: list[int] = []
        for position, weight in going:
            place = position + step
            # An occurrence near the end goes on with the draft itself, as text that repeats does.
            token = int(text[place]) if place < n else tokens[place - n]
            followed.append(token)
            votes[token] = votes.get(token, 0.0) + weight
        best = max(votes, key=votes.__getitem__)
        agreed = votes[best] / sum(votes.values())
        share *= agreed
        if share < least:
            break
        going = [one for one, token in zip(going, followed, strict=True) if token == best]
        tokens.append(best)
        agreement.append(agreed)
        if step == 0:
            source = max(going, key=lambda one: (one[1], -one[0]))[0]
    return TextDraft(tokens, agreement, match, source)


def ngram_draft(text: I32, most: int, *, shortest: int, longest: int) -> TextDraft:
    """Draft the `most` tokens after the first occurrence of the longest match of `shortest` to `longest` tokens."""
    if len(text) < 2 or most < 1:
        return NO_DRAFT
    at, lengths = _occurrences(text, longest)
    if not len(at) or int(lengths.max()) < shortest:
        return NO_DRAFT
    match = int(lengths.max())
    source = int(at[int(lengths.argmax())])
    tokens = text[source : source + most].tolist()
    return TextDraft(tokens, [1.0] * len(tokens), match, source)
