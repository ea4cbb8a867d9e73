"""Requests with a grammar: answers always follow it, and other requests are not delayed."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import GREEDY, Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import RequestError
from weft.engine.scheduling import grammars
from weft.engine.wire import grammar_text
from weft.engine.wire.messages import Finish
from weft.engine.wire.sampling import SamplingParams
from weft.kernels.reference import sampling

MODEL = MODEL_PATH
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PROMPT = TOKENIZER.encode("<|begin|><|user|>What is 12 + 30?<|end|><|assistant|>", add_special_tokens=False).ids
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


def text_of(harness: Harness, handle: int) -> str:
    return TOKENIZER.decode(harness.tokens[handle])


def is_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "b"} and 0 <= value["n"] <= 99 and value["b"] in ("x", "yes")


KINDS: dict[str, tuple[str, Any]] = {
    "schema": (grammar_text.json_schema(SCHEMA), is_schema),
    "regex": (grammar_text.regex("[0-9]{3}-[a-zä]{2}"), lambda text: re.fullmatch("[0-9]{3}-[a-zä]{2}", text)),
    "choice": (grammar_text.choice(["yes", 'no "é"\n', "yes, 🙂"]), {"yes", 'no "é"\n', "yes, 🙂"}.__contains__),
    "lark": (grammar_text.grammar('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"(\(*)x(\)*)", text)),
    "gbnf": (grammar_text.grammar('root ::= "abc" | "b" [0-9]'), lambda text: re.fullmatch("abc|b[0-9]", text)),
}


@pytest.fixture(scope="module")
def demo() -> Harness:
    return Harness(MODEL, max_num_seqs=16, page_size=8, num_pages=96)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_the_grammar_and_stop_where_it_ends(demo: Harness, kind: str) -> None:
    text, holds = KINDS[kind]
    handles = [demo.add(PROMPT, grammar=text, max_tokens=60, seed=seed, temperature=1.5) for seed in range(4)]
    handles.append(demo.add(PROMPT, grammar=text, max_tokens=60, **GREEDY))
    endless = demo.add(PROMPT, grammar=text, max_tokens=60, ignore_eos=True, **GREEDY)
    demo.run()
    for handle in (*handles, endless):
        if demo.finish[handle] is Finish.STOP:
            assert holds(text_of(demo, handle)), text_of(demo, handle)
        else:
            assert len(demo.tokens[handle]) == 60
    assert Finish.STOP in {demo.finish[handle] for handle in handles}


def test_answers_follow_the_grammar_through_preemption() -> None:
    harness = Harness(MODEL, max_num_seqs=6, page_size=8, num_pages=14, prefix_caching=False)
    harness.expect_short_outputs()
    text = grammar_text.regex("[0-9]{40}")
    handles = [harness.add(PROMPT[:9], grammar=text, max_tokens=64, seed=i, temperature=1.0) for i in range(6)]
    harness.run()
    assert harness.engine.scheduler.preemptions > 0
    assert all(re.fullmatch("[0-9]{40}", text_of(harness, handle)) for handle in handles)


def test_neighbours_get_the_same_tokens_as_alone(demo: Harness) -> None:
    alone = demo.add(PROMPT, max_tokens=12, ignore_eos=True, **GREEDY)
    demo.run()
    together = demo.add(PROMPT, max_tokens=12, ignore_eos=True, **GREEDY)
    demo.add(PROMPT, grammar=KINDS["schema"][0], max_tokens=30, **GREEDY)
    demo.run()
    assert demo.tokens[together] == demo.tokens[alone]


def test_no_request_waits_for_the_mask_of_another(demo: Harness) -> None:
    gate = threading.Event()
    slow = demo.add(PROMPT, grammar=KINDS["regex"][0], max_tokens=20, **GREEDY)
    while not demo.tokens[slow]:
        demo.step()
    demo.engine.grammars._masks.submit(gate.wait)  # masks are computed in order: the next one is after this
    while demo.engine.scheduler.slots.in_flight[0]:
        demo.step()
    before = len(demo.tokens[slow])
    free = demo.add(PROMPT, max_tokens=20, ignore_eos=True, **GREEDY)
    while free not in demo.finish:
        demo.step()
    assert len(demo.tokens[slow]) <= before + 1
    gate.set()
    demo.run()
    assert KINDS["regex"][1](text_of(demo, slow))


def test_a_choice_may_hold_any_control_character() -> None:
    tokenizer = LLTokenizer("byte")
    for code in (*range(1, 0x20), *range(0x7F, 0xA1), 0x2028):
        text = f"a{chr(code)}b"
        matcher = LLMatcher(tokenizer, grammar_text.choice([text]))
        tokens = tokenizer.tokenize_str(text)
        assert matcher.try_consume_tokens(tokens) == len(tokens), hex(code)
        assert matcher.is_accepting()


def test_minimum_length_cannot_break_a_grammar(demo: Harness) -> None:
    handle = demo.add(PROMPT, grammar=grammar_text.choice(["yes"]), max_tokens=20, min_tokens=20, **GREEDY)
    demo.run()
    assert (text_of(demo, handle), demo.finish[handle]) == ("yes", Finish.STOP)


def test_log_probabilities_are_those_of_the_model_itself(demo: Harness) -> None:
    handle = demo.add(PROMPT, grammar=grammar_text.choice(["🙂"]), max_tokens=20, logprobs=1, **GREEDY)
    demo.run()
    first = demo.logprobs[handle][0]
    assert first.rank > 1
    assert first.values[0] < first.values[1] <= 0.0


@pytest.mark.parametrize(
    "text",
    [
        grammar_text.regex("("),
        grammar_text.json_schema({"type": "nonsense"}),
        grammar_text.json_schema({"type": "array", "uniqueItems": True}),
        grammar_text.json_schema({"enum": []}),
        grammar_text.lark("start: missing"),
        "no grammar at all",
    ],
)
def test_an_unusable_grammar_is_refused_alone(demo: Harness, text: str) -> None:
    bad = demo.add(PROMPT, grammar=text)
    good = demo.add(PROMPT, max_tokens=3, ignore_eos=True, **GREEDY)
    demo.run()
    assert demo.finish[bad] is Finish.REFUSED
    assert demo.tokens[bad] == []
    assert len(demo.tokens[good]) == 3


def test_abort_while_the_grammar_is_compiled_ends_the_request(demo: Harness) -> None:
    handle = demo.add(PROMPT, grammar=grammar_text.regex("[a-z]{3}"))
    demo.engine.abort(handle)
    demo.run()
    assert demo.finish[handle] is Finish.ABORT


def test_a_model_without_a_tokenizer_refuses_grammars_only(tmp_path: Path) -> None:
    tiny.save_tiny("llama2", tmp_path)
    harness = Harness(tmp_path)
    bad, good = harness.add([3, 4], grammar=KINDS["regex"][0]), harness.add([3, 4], max_tokens=2, ignore_eos=True)
    harness.run()
    assert (harness.finish[bad], len(harness.tokens[good])) == (Finish.REFUSED, 2)


def test_compiled_grammars_are_kept_and_failures_are_not(demo: Harness) -> None:
    text, wrong, entries = grammar_text.regex("kept"), grammar_text.regex("("), demo.engine.grammars._entries
    for _ in range(2):
        demo.add(PROMPT, grammar=text, max_tokens=8)
        demo.add(PROMPT, grammar=wrong, max_tokens=8)
    demo.run()
    assert [key for key in entries if key in (text, wrong)] == [text]


def test_the_memory_of_grammars_is_bounded(demo: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = demo.engine.grammars
    for text in list(compiled._entries):
        compiled._forget(text)
    assert compiled.num_bytes == 0
    monkeypatch.setattr(grammars, "GRAMMAR_BYTES", 2500)
    texts = [grammar_text.regex(f"[0-9]{{{k},40}}") for k in range(5)]
    handles = [demo.add(PROMPT, grammar=text, grammar_bytes=1000, max_tokens=30, **GREEDY) for text in texts]
    most = 0
    while len(demo.finish) < len(handles) or not all(handle in demo.finish for handle in handles):
        demo.step()
        most = max(most, compiled.num_bytes)
    assert most == 2000, "two at a time, what nobody uses makes room"
    assert all(demo.tokens[handle] for handle in handles)
    huge = demo.add(PROMPT, grammar=grammar_text.regex("huge"), grammar_bytes=10_000, max_tokens=8)
    demo.run()
    assert demo.tokens[huge], "alone, any fits"


def test_a_grammar_beyond_the_limit_is_asked_to_retry(demo: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "GRAMMAR_BYTES", 1000)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.0)
    first = demo.add(PROMPT, grammar=KINDS["regex"][0], grammar_bytes=900, max_tokens=30, **GREEDY)
    while not demo.tokens[first] and first not in demo.finish:
        demo.step()
    second = demo.add(PROMPT, grammar=grammar_text.regex("second"), grammar_bytes=900, max_tokens=30)
    demo.run()
    assert demo.finish[second] is Finish.BUSY


def test_the_grammar_of_an_aborted_request_is_not_compiled(demo: Harness) -> None:
    compiled, gate = demo.engine.grammars, threading.Event()
    for _ in range(grammars.COMPILE_THREADS):
        compiled._compilers.submit(gate.wait)
    text = grammar_text.regex("nobody's")
    handles = [demo.add(PROMPT, grammar=text) for _ in range(2)]
    demo.engine.abort(handles[0])
    assert text in compiled._entries
    demo.engine.abort(handles[1])
    assert text not in compiled._entries
    gate.set()
    demo.run()
    assert {demo.finish[handle] for handle in handles} == {Finish.ABORT}


def test_text_that_is_not_a_grammar_is_refused() -> None:
    for nothing in (False, {"not": {}}):
        with pytest.raises(RequestError, match="no value"):
            grammar_text.json_schema(nothing, lenient=True)
    with pytest.raises(RequestError, match="cannot be read"):
        grammar_text.grammar("root ::= (")
    with pytest.raises(RequestError, match="at most"):
        SamplingParams(grammar="x" * (grammar_text.MAX_GRAMMAR_CHARS + 1))


def test_white_space_between_json_tokens_is_bounded(demo: Harness) -> None:
    handle = demo.add(
        PROMPT, grammar=KINDS["schema"][0], max_tokens=300, logit_bias={TOKENIZER.token_to_id("Ċ"): 100.0}, **GREEDY
    )
    demo.run()
    assert is_schema(text_of(demo, handle))


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_a_mask_leaves_exactly_its_tokens(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 4))
    words = -(-vocab // 32) + data.draw(st.integers(-1, 1))
    masked = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    masks = [data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=words, max_size=words)) for _ in masked]
    logits = torch.randn(rows, vocab)
    before = logits.clone()
    bits = torch.tensor(masks, dtype=torch.int32).reshape(len(masked), words)
    sampling.allow_only(logits, torch.tensor(masked), bits)
    for row in range(rows):
        for token in range(vocab):
            allowed = True
            if row in masked:
                mask = masks[masked.index(row)]
                allowed = token < 32 * words and bool(mask[token // 32] >> (token % 32) & 1)
            assert logits[row, token] == (before[row, token] if allowed else -torch.inf)
