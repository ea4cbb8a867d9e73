"""Streaming text equals decoding all ids at once, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.server.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from weft.server.tokenizer import Tokenizer, spell

KINDS = {
    "byte_level": vocabularies.byte_level(),
    "sentencepiece": vocabularies.sentencepiece(),
    "gemma": vocabularies.sentencepiece(strip=False),
    "metaspace": vocabularies.metaspace(),
    "wordpiece": vocabularies.wordpiece(),
}
TOKENIZERS = {name: Tokenizer(vocabularies.wrapped(kind)) for name, kind in KINDS.items()}


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(detokenizer.feed(token_id) for token_id in ids) + detokenizer.flush()


def ids_of(kind: str, **size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, KINDS[kind].get_vocab_size() - 1), **size)


@given(ids_of("byte_level"))
def test_random_byte_level_ids_stream_to_the_decoded_text(ids: list[int]) -> None:
    expected = KINDS["byte_level"].decode(ids, skip_special_tokens=True)
    assert stream(TOKENIZERS["byte_level"].detokenizer(), ids) == expected


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece"])
@settings(max_examples=50)
@given(data=st.data())
def test_random_ids_of_other_decoders_stream_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    assert stream(TOKENIZERS[kind].detokenizer(), ids) == KINDS[kind].decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
@given(data=st.data())
def test_random_word_ids_and_byte_fallback_characters_stream_to_the_decoded_text(
    kind: str, data: st.DataObject
) -> None:
    # The decoder replaces a whole run of byte tokens when any of it is broken, which no stream can know in advance.
    words = st.lists(st.integers(259, KINDS[kind].get_vocab_size() - 1))
    characters = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()])
    ids = [i for part in data.draw(st.lists(st.one_of(words, characters))) for i in part]
    assert stream(TOKENIZERS[kind].detokenizer(), ids) == KINDS[kind].decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
@given(text=st.text())
def test_text_that_continues_a_prompt_completes_the_decoded_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("hello world" + text)
    prompt, output = ids[:1], ids[1:]
    assert tokenizer.decode(prompt) + stream(tokenizer.detokenizer(prompt), output) == tokenizer.decode(ids)


@given(text=st.text())
def test_no_broken_character_is_ever_shown(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer, shown = tokenizer.detokenizer(), ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.feed(token_id)
        assert tokenizer.decode(tokenizer.encode(text)).startswith(shown)


def test_unfinished_character_is_held_back_and_flushed_as_one_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = tokenizer.detokenizer()
    first, *_ = tokenizer.encode("你")
    assert detokenizer.feed(first) == ""
    assert detokenizer.flush() == "\ufffd"


def test_first_space_of_a_text_is_dropped_but_not_that_of_a_continuation() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello = tokenizer.encode("hello")
    bos = KINDS["sentencepiece"].token_to_id("<s>")
    assert stream(tokenizer.detokenizer([bos]), hello) == "hello"
    assert stream(tokenizer.detokenizer([bos, *hello]), hello) == " hello"


def test_special_and_end_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(vocabularies.wrapped(vocabularies.byte_level()))
    eos, o = tokenizer.encode("<|eos|>")[0], tokenizer.encode("o")[0]
    tokenizer.hide([o])
    assert stream(tokenizer.detokenizer(), [*tokenizer.encode("hello"), eos, o]) == "hello"
    assert tokenizer.decode([eos, o]) == ""


def test_window_never_grows_on_endless_broken_bytes() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    detokenizer = WindowDetokenizer(decode, (), ())
    assert stream(detokenizer, range(1000)) == "\ufffd" * 1000
    assert max(lengths) <= 2 * WindowDetokenizer.MAX_HELD


def test_known_decoders_take_the_byte_path() -> None:
    taken = {name: isinstance(tokenizer.detokenizer(), ByteDetokenizer) for name, tokenizer in TOKENIZERS.items()}
    assert taken == {
        "byte_level": True,
        "sentencepiece": True,
        "gemma": True,
        "metaspace": False,
        "wordpiece": False,
    }


def test_tokens_that_are_parts_of_characters_are_spelled_apart() -> None:
    assert [spell(b"ab"), spell("é".encode()), spell(b"\xe4"), spell(b"\xbd\xa0")] == [
        "ab",
        "é",
        "bytes:\\xe4",
        "bytes:\\xbd\\xa0",
    ]
