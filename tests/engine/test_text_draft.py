"""Drafts from a text equal those of a search by hand, and n-gram drafts those of `transformers`' prompt lookup."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from weft.engine.scheduling import text_draft
from weft.engine.scheduling.text_draft import LONGEST_MATCH, WEIGHT, ngram_draft, suffix_draft

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def by_hand(text: list[int], most: int, factor: float) -> tuple[list[int], list[float], int]:
    """The draft, its agreement and its match, with loops over all positions."""
    lengths = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(place, LONGEST_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length:
            lengths[place] = length
    longest = max(lengths.values(), default=0)
    grown, agreement, going = list(text), [], dict(lengths)
    for step in range(min(most, int(factor * longest)) if lengths else 0):
        votes: dict[int, float] = defaultdict(float)
        for place, length in going.items():
            votes[grown[place + step]] += WEIGHT ** (length - longest)
        best = max(votes, key=lambda token: votes[token])
        agreement.append(votes[best] / sum(votes.values()))
        going = {place: length for place, length in going.items() if grown[place + step] == best}
        grown.append(best)
    return grown[len(text) :], agreement, longest


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(0, 12), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_suffix_draft_is_the_one_found_by_hand(text: list[int], most: int, factor: float) -> None:
    draft = suffix_draft(array(text), most, factor=factor)
    tokens, agreement, match = by_hand(text, most, factor)
    assert draft.tokens == tokens
    assert draft.agreement == pytest.approx(agreement)
    if tokens:
        assert draft.match == match
        assert text[draft.source] == tokens[0]


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.floats(0.0, 1.0), st.integers(2, 20))
def test_drafts_end_where_agreement_or_reach_do(text: list[int], least: float, reach: int) -> None:
    whole = suffix_draft(array(text), 12)
    draft = suffix_draft(array(text), 12, least=least, reach=reach)
    assert draft.tokens == whole.tokens[: len(draft.tokens)]
    assert all(share >= least for share in np.cumprod(draft.agreement))
    assert len(draft.tokens) + whole.match <= reach or not draft.tokens
    if len(draft.tokens) < min(len(whole.tokens), reach - whole.match):
        assert np.prod(whole.agreement[: len(draft.tokens) + 1]) < least


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 8), st.integers(1, 5))
def test_an_ngram_draft_is_that_of_transformers(text: list[int], most: int, longest: int) -> None:
    oracle = PromptLookupCandidateGenerator(None, most, longest, max_length=10_000)
    candidates, _ = oracle.get_candidates(torch.tensor([text]))
    assert ngram_draft(array(text), most, shortest=1, longest=longest).tokens == candidates[0, len(text) :].tolist()


def test_an_ngram_draft_needs_its_shortest_match() -> None:
    assert ngram_draft(array([1, 2, 3, 9, 2, 3]), 2, shortest=2, longest=4).tokens == [9, 2]
    assert ngram_draft(array([1, 2, 3, 9, 2, 3]), 2, shortest=3, longest=4).tokens == []


def test_a_repetition_goes_on_with_itself() -> None:
    assert suffix_draft(array([5, 1, 2, 3, 1, 2, 3]), 8, factor=8.0).tokens == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_separator_is_never_drafted_nor_matched() -> None:
    """A prediction precedes the prompt, with -1 between them."""
    draft = suffix_draft(array([7, 8, 9, -1, 4, 8]), 3, factor=8.0)
    assert draft.tokens[:1] == [9]
    assert draft.source == 2


def test_the_work_for_a_text_of_one_token_is_bounded() -> None:
    """The worst text: every position matches."""
    text = np.full(200_000, 3, np.int32)
    at, lengths = text_draft._occurrences(text, LONGEST_MATCH)
    assert len(at) == text_draft.MOST_SCANNED
    assert (lengths == LONGEST_MATCH).all()
    assert suffix_draft(text, 16).tokens == [3] * 16
