"""Stop strings against a brute-force oracle, whatever the pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.server.stops import StopStrings

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that completes first; of those, the longest."""
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


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.feed(text) for text in ("abE", "N", "x", "EN", "D", "more")] == ["ab", "", "ENx", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).feed("anything") == "anything"
