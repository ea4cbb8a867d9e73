"""Stop strings against a brute-force oracle, for any split of the text."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.server.text.stop_regex import MAX_MATCH_CHARS, PatternSearch, StopPatterns
from weft.server.text.stops import StopStrings

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that completes first; among equals, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(TEXTS, STOPS, st.lists(st.integers(0, 30)), st.booleans())
def test_text_is_cut_at_the_stop_that_completes_first(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    matcher, shown = StopStrings(stops, include=include), ""
    for start, end in pairwise(borders):
        shown += matcher.feed(text[start:end])
        assert len(text[:end]) - len(shown) < max(map(len, stops)) or matcher.matched
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == expected(text, stops, include)


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.booleans()
)
@settings(max_examples=400)
def test_text_that_arrives_by_the_character_is_held_back_no_longer_than_needed(
    text: str, stops: list[str], include: bool
) -> None:
    matcher, shown = StopStrings(stops, include=include), ""
    for end in range(1, len(text) + 1):
        shown += matcher.feed(text[end - 1])
        if matcher.matched is not None:
            break
        ends = (text[end - n : end] for n in range(end + 1))
        held = max(len(tail) for tail in ends if any(stop.startswith(tail) for stop in stops))
        assert shown == text[: end - held]
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == expected(text, stops, include)


def test_the_longest_prefix_of_any_stop_is_held_back() -> None:
    for stops in (["aab", "ab"], ["ab", "aab"]):
        matcher = StopStrings(stops)
        assert [matcher.feed(text) for text in "caac"] == ["c", "", "", "aac"]


def test_only_a_possible_prefix_is_held_back() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.feed(text) for text in ("abE", "N", "x", "EN", "D", "more")] == ["ab", "", "ENx", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).feed("anything") == "anything"


@given(
    st.lists(st.sampled_from(["a", "b", "<", "/", ">", "<>", "</>", "ab"]), max_size=20).map("".join),
    st.lists(st.text("ab<>/", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=400)
def test_no_stop_string_is_found_in_markup(
    text: str, stops: list[str], cuts: list[int], include: bool, endless: bool
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    matcher = StopStrings(stops, include=include, markup=("<>", None if endless else "</>"))
    shown = "".join(matcher.feed(text[start:end]) for start, end in pairwise(borders))
    if matcher.matched is None:
        shown += matcher.flush()
    wanted, matched = "", None
    for part in re.split(r"(<>.*)" if endless else r"(<>.*?</>|<>.*)", text):
        if matched is None and part.startswith("<>"):
            wanted += part
        elif matched is None:
            cut, matched = expected(part, stops, include)
            wanted += cut
    assert (shown, matcher.matched) == (wanted, matched)


QUANTIFIERS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"]
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(QUANTIFIERS)).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
    ),
    max_leaves=6,
)


def first_match(text: str, pattern: str) -> tuple[int, int] | None:
    """The match that ends first, from its earliest beginning, by trying all."""
    compiled = re.compile(pattern)
    spans = ((start, end) for end in range(1, len(text) + 1) for start in range(end))
    return next((span for span in spans if compiled.fullmatch(text, *span)), None)


@given(st.text("abc\n", max_size=12), PATTERNS, st.lists(st.integers(0, 12)), st.booleans())
@settings(max_examples=400)
def test_text_is_cut_at_the_first_match_of_a_pattern(text: str, pattern: str, cuts: list[int], include: bool) -> None:
    assume(not re.compile(pattern).fullmatch(""))
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    matcher, shown = StopStrings([], StopPatterns([pattern]), include=include), ""
    for start, end in pairwise(borders):
        shown += matcher.feed(text[start:end])
    if matcher.matched is None:
        shown += matcher.flush()
    found = first_match(text, pattern)
    assert (shown, matcher.matched) == ((text, None) if found is None else (text[: found[include]], pattern))


@given(st.text("ab<>", max_size=20), st.lists(st.integers(0, 20)))
def test_patterns_and_strings_together_stop_like_the_first_and_not_in_markup(text: str, cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    matcher, shown = StopStrings(["aab"], StopPatterns(["b[ab]a"]), markup=("<", ">")), ""
    for start, end in pairwise(borders):
        shown += matcher.feed(text[start:end])
    shown += matcher.flush() if matcher.matched is None else ""
    for found in re.finditer(r"<[^>]*(?:>|$)|[^<]+", text):
        plain = found[0]
        spans = [
            s for s in (first_match(plain, "b[ab]a"), first_match(plain, "aab")) if s and not plain.startswith("<")
        ]
        if spans:
            start, _ = min(spans, key=lambda span: (span[1], span[0]))
            assert shown == text[: found.start() + start]
            return
    assert shown == text


def test_a_pattern_costs_a_bounded_number_of_steps_per_character() -> None:
    """`re` would take longer than the universe exists."""
    for pattern in ("(a|a)*(a|b)*c", "(a*)*(a*)*b", "(a?){30}a{30}b", ".*.*.*x"):
        matcher = StopStrings([], StopPatterns([pattern]))
        assert not matcher.feed("a" * 3000).strip("a")
        assert matcher.matched is None
        assert len(matcher.flush()) <= MAX_MATCH_CHARS


def test_text_that_may_belong_to_a_long_match_is_held_back_up_to_a_limit() -> None:
    matcher = StopStrings([], StopPatterns(["<.*>"]))
    assert matcher.feed("a<" + "b" * (MAX_MATCH_CHARS - 1)) == "a"
    assert matcher.feed("bb") == "<" + "b" * (MAX_MATCH_CHARS + 1)
    assert matcher.feed("b>") == "b>"


@pytest.mark.parametrize("pattern", ["(?i)straße", "(?i:ST)RASSE", r"\d\s\D", r"[^\W\d_]9", "[a-cx]y", "(?s).x", "é"])
def test_classes_and_flags_are_those_of_re(pattern: str) -> None:
    for text in ("STRASSE", "Straße", "5 a", "a9", "_9", "xy", "by", "dy", "\nx", "É", "é", "٣ x"):
        assert (PatternSearch(StopPatterns([pattern])).feed(text) is not None) == bool(re.search(pattern, text))
