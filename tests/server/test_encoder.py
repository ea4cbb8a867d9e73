"""The cache of a conversation's tokens changes none of them, for any vocabulary and any text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from vocabularies import byte_level, metaspace, sentencepiece, wordpiece, wrapped

from weft.server.text import tokenizer as tokenizer_module
from weft.server.text.encoder import Encoder, any_of


def first_prepends() -> Tokenizer:
    """Puts a space before a text, and not after its control tokens."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def greedy_marks() -> Tokenizer:
    """Control tokens that include the surrounding white space, share prefixes, or contain each other."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<|user|>>")])
    tokenizer.add_special_tokens(
        [AddedToken("<right>", rstrip=True, normalized=False), AddedToken("ll<|user|>", normalized=True)]
    )
    return tokenizer


def words_alone() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("ello", single_word=True)])
    return tokenizer


KINDS = {
    f.__name__: f()
    for f in (byte_level, sentencepiece, metaspace, wordpiece, first_prepends, greedy_marks, words_alone)
}
PIECES = ["hello", "hell<|user|>", " world", " ", "\n", "é", "<|user|>", "<|user|>>", "<|", "ll", "<s>", "</s>",
          "<left>", "<right>", "<think>", "né e", "[CLS]", "ello"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(first=TEXTS, rest=TEXTS)
def test_tokens_are_those_of_the_whole_text(kind: str, first: str, rest: str) -> None:
    encoder = Encoder(KINDS[kind], min_segment=1)
    for text in (first, first + rest, first + rest, rest):
        assert encoder.encode_cached(text, "") == encoder.encode([text], add_special_tokens=False)[0]


class Counting:
    """Counts the characters that a tokenizer encodes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.characters = 0

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()  # type: ignore[no-any-return]

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def conversation(turns: int) -> str:
    return "".join(f"<|user|>{i} {'hello world ' * 50}<|assistant|>{i} {'world' * 100}" for i in range(turns))


def test_a_later_turn_encodes_only_its_new_text() -> None:
    backend = Counting(byte_level())
    encoder = Encoder(backend)
    encoder.encode_cached(conversation(50), "")
    first, backend.characters = backend.characters, 0
    encoder.encode_cached(conversation(51), "")
    assert backend.characters <= first / 50 + 2000


def test_another_salt_finds_nothing() -> None:
    backend = Counting(byte_level())
    encoder = Encoder(backend)
    encoder.encode_cached(conversation(5), "mine")
    first, backend.characters = backend.characters, 0
    encoder.encode_cached(conversation(5), "theirs")
    assert backend.characters == first


def test_the_least_recently_used_is_evicted_first() -> None:
    backend = Counting(byte_level())
    encoder = Encoder(backend, max_bytes=60_000)
    encoder.encode_cached(conversation(5), "")
    for i in range(20):
        encoder.encode_cached(f"<|system|>{i}" + conversation(5), "")
        encoder.encode_cached(conversation(5), "")
        assert 0 < encoder.num_bytes <= 60_000
    backend.characters = 0
    encoder.encode_cached(conversation(5), "")
    assert backend.characters < len(conversation(5)) / 4
    encoder.encode_cached("".join(conversation(1) + str(i) for i in range(500)), "")
    assert 0 < encoder.num_bytes <= 60_000


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.text("ab|<", min_size=1, max_size=4), min_size=1, max_size=8), text=st.text("ab|<", max_size=20)
)
def test_the_longest_word_is_found_where_the_first_begins(words: list[str], text: str) -> None:
    pattern = any_of(words)
    assert pattern is not None
    plain = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    assert [m.span() for m in pattern.finditer(text)] == [m.span() for m in plain.finditer(text)]


def test_a_tokenizer_encodes_conversations_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Encoder] = []

    def counted(backend: Tokenizer) -> Encoder:
        made.append(Encoder(Counting(backend)))
        return made[-1]

    monkeypatch.setattr(tokenizer_module, "Encoder", counted)
    tokenizer = tokenizer_module.Tokenizer(wrapped(byte_level()))
    text = conversation(4) + tokenizer.as_text("<|system|>hello") + conversation(4)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False, salt="") == expected
    assert tokenizer.encode(text, add_special_tokens=False, salt="") == expected
    (encoder,) = made
    assert encoder.num_bytes > len(conversation(4))
