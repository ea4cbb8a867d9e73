"""The reader of event streams, for any split of the bytes."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.loadgen.stream import AnswerReader, error_message


def event(value: dict[str, Any], *, spaced: bool = False) -> bytes:
    return b"data: " + json.dumps(value, separators=None if spaced else (",", ":")).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
}
DONE = b"data: [DONE]\n\n"
ANSWER = event(text("a")) + event(text('"finish_reason":null')) + event(text("c", "length")) + event(USAGE) + DONE


def read(data: bytes, cuts: list[int] | None = None, *, keep_text: bool = False) -> AnswerReader:
    """The time of each piece is its number."""
    reader = AnswerReader(array("d"), keep_text=keep_text)
    edges = [0, *sorted(cuts or []), len(data)]
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        if end > start:
            reader.feed(data[start:end], float(i))
    return reader


@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=12), st.booleans(), st.booleans())
def test_tokens_usage_and_end_are_found_for_any_split_of_the_stream(
    cuts: list[int], crlf: bool, keep_text: bool
) -> None:
    reader = read(ANSWER.replace(b"\n", b"\r\n") if crlf else ANSWER, cuts, keep_text=keep_text)
    assert len(reader.times) == 3
    assert list(reader.times) == sorted(reader.times)
    assert (reader.prompt, reader.completion, reader.cached) == (7, 3, 2)
    assert (reader.finished, reader.done, reader.error) == (True, True, "")


def test_a_token_gets_the_time_at_which_its_event_was_complete() -> None:
    first, second = event(text("a")), event(text("b"))
    reader = read(first + second, [5, len(first), len(first) + 5])
    assert list(reader.times) == [1.0, 3.0]


@pytest.mark.parametrize("spaced", [False, True])
def test_the_opening_of_a_message_is_not_a_token(spaced: bool) -> None:
    parts = [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop")]
    reader = AnswerReader(array("d"))
    for i, part in enumerate(parts):
        reader.feed(event(part, spaced=spaced), float(i))
    assert list(reader.times) == [1.0, 2.0]
    assert reader.end == 3.0
    assert reader.finished


def test_a_token_without_text_and_a_thought_are_tokens() -> None:
    reader = read(event(delta(role="assistant")) + event(delta(reasoning_content="hm")) + event(delta(content="")))
    assert len(reader.times) == 2


def test_comments_are_not_tokens_and_empty_streams_have_none() -> None:
    reader = read(b": waiting\n\n" + event(text("a")) + b": waiting\n\n" + DONE)
    assert len(reader.times) == 1
    assert not read(DONE).times


def test_an_error_event_is_kept_as_its_message() -> None:
    reader = read(event(text("a")) + event({"error": {"message": "The engine\ndied."}}))
    assert reader.error == "The engine died."
    assert not reader.done
    assert read(b"data: {oops\n\n").error


def test_text_is_kept_on_request() -> None:
    assert read(ANSWER, keep_text=True).text == ["a", '"finish_reason":null', "c"]
    assert read(ANSWER).text == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "x"}}, "x"),
        ({"error": "y"}, "y"),
        ({"detail": "z"}, "z"),
        ({"message": "w"}, "w"),
        ([1], "[1]"),
        ({"error": {"message": "l" * 500}}, "l" * 200),
    ],
)
def test_messages_are_found_in_every_kind_of_error(body: Any, message: str) -> None:
    assert error_message(body) == message


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": 5},
        {"choices": ["a"]},
        {"choices": [], "usage": "many"},
        {"choices": [], "usage": {"prompt_tokens": "x"}},
        {"choices": [], "usage": {"prompt_tokens": [1]}},
        {"choices": [{"delta": "a", "finish_reason": None}]},
        {"choices": [{"text": ["a"], "finish_reason": None}]},
    ],
)
def test_an_event_of_an_unknown_form_is_reported_as_such(chunk: dict[str, Any]) -> None:
    reader = read(event(text("a")) + event(chunk) + DONE, keep_text=True)
    assert reader.error == "an event that is not in OpenAI's format"
    assert "".join(reader.text) == "a"
