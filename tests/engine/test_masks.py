"""`allowed_token_ids` and `bad_words`: allowed and forbidden tokens, combined with all other features."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tiny
from harness import GREEDY, Harness
from test_grammar import PROMPT, TOKENIZER, text_of

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import RequestError
from weft.engine.scheduling import bad_words, constraints
from weft.engine.scheduling.bad_words import BadWords, Vocabulary
from weft.engine.wire import grammar_text
from weft.engine.wire.messages import Finish
from weft.engine.wire.sampling import MAX_BAD_CHARS, SamplingParams

PLAIN = {"max_tokens": 12, "ignore_eos": True, **GREEDY}


@pytest.fixture(scope="module")
def demo() -> Harness:
    return Harness(MODEL_PATH, max_num_seqs=16, page_size=8, num_pages=96)


def run(harness: Harness, **params: object) -> int:
    handle = harness.add(PROMPT, **params)
    harness.run()
    return handle


def has(mask: np.ndarray, token: int) -> bool:
    return bool(mask.view(np.uint32)[token >> 5] >> (token & 31) & 1)


# -- allowed_token_ids


@pytest.mark.parametrize("ids", [(5,), (0,), (2047,), (20, 21), tuple(range(100, 164))])
def test_only_allowed_tokens_are_generated(demo: Harness, ids: tuple[int, ...]) -> None:
    handles = [demo.add(PROMPT, allowed_token_ids=ids, **PLAIN)]
    handles += [demo.add(PROMPT, allowed_token_ids=ids, max_tokens=12, temperature=1.5, seed=k) for k in range(3)]
    demo.run()
    for handle in handles:
        assert demo.tokens[handle]
        assert set(demo.tokens[handle]) <= set(ids)


def test_allowing_the_likely_tokens_changes_nothing(demo: Harness) -> None:
    free = run(demo, **PLAIN)
    same = run(demo, allowed_token_ids=tuple(set(demo.tokens[free])), **PLAIN)
    everything = run(demo, allowed_token_ids=tuple(range(2048)), **PLAIN)
    assert demo.tokens[same] == demo.tokens[everything] == demo.tokens[free]


def test_allowed_tokens_are_launched_ahead(demo: Harness) -> None:
    handle = demo.add(PROMPT, allowed_token_ids=(20, 21, 22), **PLAIN)
    ahead = 0
    while handle not in demo.finish:
        demo.step()
        ahead = max(ahead, int(demo.engine.scheduler.slots.in_flight.max()))
        assert not demo.engine.scheduler.slots.constrained.any()
        assert not demo.engine.grammars.num_compiling
    assert ahead > 0


# -- bad_words: tokens


def spells(words: list[str], text: bytes) -> bool:
    return any(word.encode() in text for word in words)


def test_the_automaton_bans_tokens_that_would_complete_a_word() -> None:
    """Compares with brute force: every token after every text."""
    rng = random.Random(3)
    for _ in range(60):
        alphabet = "ab" if rng.random() < 0.5 else "abé"
        pieces = sorted({"".join(rng.choices(alphabet, k=rng.randint(1, 4))).encode() for _ in range(30)})
        pieces += [b"", bytes([0xC3]), bytes([0xA9]), b"\xff"]
        vocabulary = Vocabulary(_Pieces(pieces), len(pieces))  # type: ignore[arg-type]
        words = list({"".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))})
        watched = BadWords(words, vocabulary)
        state, text = 0, b""
        for _ in range(15):
            banned = set(watched.banned(state).tolist())
            good = []
            for token, piece in enumerate(pieces):
                allowed = has(watched.allowed, token) and token not in banned
                assert allowed == (not spells(words, text + piece)), (words, text, piece)
                good += [token] * allowed
            token = rng.choice(good)
            state, text = watched.after(state, token), text + pieces[token]


class _Pieces:
    """Acts as an `LLTokenizer`; its last token but three is special."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)

    def is_special_token(self, token: int) -> bool:
        return not self._pieces[token]

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self._pieces[token] for token in tokens)


def test_many_long_words_take_little_memory(demo: Harness) -> None:
    words = tuple("a" * k for k in range(2, 170))
    assert sum(map(len, words)) < MAX_BAD_CHARS
    handle = run(demo, bad_words=words, logit_bias={TOKENIZER.token_to_id("a"): 100.0}, **PLAIN)
    assert "aa" not in text_of(demo, handle)
    with pytest.raises(RequestError, match="characters together"):
        SamplingParams(bad_words=("a" * MAX_BAD_CHARS, "b"))


# -- bad_words: requests


@pytest.mark.parametrize("preempted", [False, True])
def test_bad_words_do_not_occur(demo: Harness, preempted: bool) -> None:
    harness = demo
    if preempted:
        harness = Harness(MODEL_PATH, max_num_seqs=6, page_size=8, num_pages=14, prefix_caching=False)
        harness.expect_short_outputs()
    # A stop token that is never generated: admission cannot know how long they will be.
    params = {
        "max_tokens": 40,
        "temperature": 1.0,
        "ignore_eos": True,
        "stop_token_ids": (3,),
        "logit_bias": {3: -100.0},
    }
    free = [harness.add(PROMPT[:9], seed=k, **params) for k in range(6)]
    harness.run()
    texts = [text_of(harness, handle) for handle in free]
    # Likely output: single letters, parts of words, pieces that several tokens spell.
    words = ("e", " t", texts[0][3:7], texts[1][1:9], texts[2][5:25])
    bound = [harness.add(PROMPT[:9], seed=k, bad_words=words, **params) for k in range(6)]
    harness.run()
    assert (harness.engine.scheduler.preemptions > 0) == preempted
    for handle in bound:
        assert len(harness.tokens[handle]) == 40
        assert not any(word in text_of(harness, handle) for word in words), text_of(harness, handle)
    assert any(word in text for word in words for text in texts)


def test_words_that_would_not_occur_change_nothing(demo: Harness) -> None:
    free = run(demo, **PLAIN)
    same = run(demo, bad_words=("certainly not this",), **PLAIN)
    assert demo.tokens[same] == demo.tokens[free]


# -- together


def test_masks_combine_with_grammars(demo: Harness) -> None:
    digits = tuple(TOKENIZER.token_to_id(d) for d in "123")
    text = grammar_text.regex("[0-9]{6}")
    handles = [
        demo.add(PROMPT, grammar=text, allowed_token_ids=digits, bad_words=("12", "3"), seed=k, max_tokens=20)
        for k in range(6)
    ]
    demo.run()
    for handle in handles:
        out = text_of(demo, handle)
        assert (len(out), demo.finish[handle]) == (6, Finish.STOP)
        assert set(out) <= {"1", "2"}
        assert "12" not in out


def test_a_mask_without_any_token_ends_the_request_alone(demo: Harness) -> None:
    one = TOKENIZER.token_to_id("1")
    none = demo.add(PROMPT, allowed_token_ids=(one,), bad_words=("1",), max_tokens=5)
    late = demo.add(PROMPT, allowed_token_ids=(one,), bad_words=("111",), max_tokens=5)
    apart = demo.add(PROMPT, allowed_token_ids=(one,), grammar=grammar_text.regex("[a-z]+"), max_tokens=5)
    fine = demo.add(PROMPT, **PLAIN)
    errors: dict[int, str] = {}
    while demo.engine.has_work:
        if (outputs := demo.step()) is not None:
            errors |= outputs.errors
    assert [demo.finish[h] for h in (none, late, apart)] == [Finish.REFUSED] * 3
    assert errors[late] == errors[apart] == constraints.STUCK
    assert demo.tokens[late] == [one, one]
    assert demo.tokens[none] == demo.tokens[apart] == []
    assert len(demo.tokens[fine]) == 12


def test_unusable_masks_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one id"):
        SamplingParams(allowed_token_ids=())
    with pytest.raises(RequestError, match="one character"):
        SamplingParams(bad_words=("",))


def test_a_model_without_a_tokenizer_has_masks_but_no_words(tmp_path: Path) -> None:
    tiny.save_tiny("llama2", tmp_path)
    harness = Harness(tmp_path)
    ids = harness.add([3, 4], allowed_token_ids=(7,), max_tokens=3)
    words = harness.add([3, 4], bad_words=("x",), max_tokens=3)
    harness.run()
    assert (harness.tokens[ids], harness.finish[words]) == ([7, 7, 7], Finish.REFUSED)
    with pytest.raises(RequestError, match="outside"):
        harness.add([3, 4], allowed_token_ids=(10**6,))


def test_masks_are_those_of_their_tokens() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 31, 32, 33, 100):
        ids = rng.choice(size, rng.integers(1, size + 1), replace=False).astype(np.int32)
        mask = bad_words.only(ids.tolist(), size)
        assert len(mask) == -(-size // 32)
        assert [i for i in range(32 * len(mask)) if has(mask, i)] == sorted(ids.tolist())
        less = bad_words.without(mask, ids[: len(ids) // 2])
        assert [i for i in range(size) if has(less, i)] == sorted(ids[len(ids) // 2 :].tolist())
