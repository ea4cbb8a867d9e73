"""Streaming text equals decoding all ids at once, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.server.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from weft.server.text.tokenizer import Tokenizer, spell

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
    # The decoder replaces a whole run of byte tokens if any of it is broken, which no stream can know in advance.
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
def test_no_broken_character_is_ever_sent(text: str) -> None:
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


def utf8(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


# Five U+FFFD in a row would be as many tokens without another character as the window accepts.
@given(
    text=st.text(st.sampled_from("aé你😀\ufffd ")).filter(lambda text: "\ufffd" * 5 not in text),
    context=st.text(st.sampled_from("aé你"), max_size=3),
)
def test_the_window_emits_whole_characters_as_soon_as_they_are_complete(text: str, context: str) -> None:
    detokenizer, shown, fed = WindowDetokenizer(utf8, (), list(context.encode())), "", b""
    for byte in text.encode():
        shown += detokenizer.feed(byte)
        fed += bytes([byte])
        # A complete character that looks like an unfinished one cannot be distinguished from it.
        assert shown == fed.decode("utf-8", "ignore").rstrip("\ufffd")
    assert shown + detokenizer.flush() == text


def test_the_window_emits_text_before_an_unfinished_character_with_it() -> None:
    first, *rest = "你".encode()
    detokenizer = WindowDetokenizer(lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace"), (), ())
    pieces = [b"a" + bytes([first]), bytes(rest), b"\xff", b"b"]
    assert [detokenizer.feed(i) for i in (0, 1, 2, 3)] == ["", "a你", "", "\ufffdb"]
    assert detokenizer.flush() == ""


def test_the_window_flushes_an_unfinished_character_as_one_replacement() -> None:
    detokenizer = WindowDetokenizer(utf8, (), ())
    assert [detokenizer.feed(byte) for byte in "a你".encode()[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_the_window_emits_text_after_many_tokens_without_a_character() -> None:
    detokenizer = WindowDetokenizer(utf8, (), ())
    most = WindowDetokenizer.MAX_HELD
    assert [detokenizer.feed(0xFF) for _ in range(most + 1)] == [""] * (most - 1) + ["\ufffd" * most, ""]
    assert detokenizer.flush() == "\ufffd"


def test_the_window_emits_no_text_for_tokens_without_text() -> None:
    detokenizer = WindowDetokenizer(lambda ids: "".join({1: "", 2: "b"}.get(i, "?") for i in ids), (9,), ())
    assert [detokenizer.feed(i) for i in (1, 9, 2, 9, 1, 2)] == ["", "", "b", "", "", "b"]


def test_the_window_keeps_its_context_over_tokens_without_text() -> None:
    pieces = [" a", "", " b"]
    # Decoders that drop the first space of a text are similar: without the token before, " b" would be "b".
    detokenizer = WindowDetokenizer(lambda ids: "".join(pieces[i] for i in ids).removeprefix(" "), (), ())
    assert [detokenizer.feed(i) for i in (0, 1, 2)] == ["a", "", " b"]


def test_the_first_space_is_dropped_after_tokens_without_bytes() -> None:
    class Bytes(list[bytes]):
        strips_space = True

    detokenizer = ByteDetokenizer(Bytes([b"", b" a"]), (), at_start=True)  # type: ignore[arg-type]
    assert [detokenizer.feed(i) for i in (0, 1, 1)] == ["", "a", " a"]


def test_the_window_never_grows_on_endless_broken_bytes() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    detokenizer = WindowDetokenizer(decode, (), ())
    assert stream(detokenizer, range(1000)) == "\ufffd" * 1000
    assert max(lengths) <= 2 * WindowDetokenizer.MAX_HELD


def test_known_decoders_take_the_byte_path() -> None:
    taken = {name: isinstance(tokenizer.detokenizer(), ByteDetokenizer) for name, tokenizer in TOKENIZERS.items()}
    assert taken == {"byte_level": True, "sentencepiece": True, "gemma": True, "metaspace": False, "wordpiece": False}


def test_tokens_that_are_parts_of_characters_are_written_as_bytes() -> None:
    assert [spell(b"ab"), spell("é".encode()), spell(b"\xe4"), spell(b"\xbd\xa0")] == [
        "ab",
        "é",
        "bytes:\\xe4",
        "bytes:\\xbd\\xa0",
    ]
