"""Shapes without a tokenizer are served with the demo's, for measurements over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from live import running

from weft.engine.demo import MODEL_PATH
from weft.server.text.tokenizer import Tokenizer


def test_ids_unknown_to_the_stand_in_are_written_as_numbers() -> None:
    tokenizer = Tokenizer.load(MODEL_PATH)
    known = tokenizer.encode("Hello", add_special_tokens=False)
    ids = [*known, 50000, *known]
    plain = tokenizer.detokenizer()
    assert "".join(map(plain.feed, ids)) + plain.flush() == "HelloHello"
    tokenizer = Tokenizer.load(MODEL_PATH)
    tokenizer.name_unknown_ids()
    named = tokenizer.detokenizer()
    assert "".join(map(named.feed, ids)) + named.flush() == "Hello<50000>Hello"


@pytest.mark.slow
def test_a_shape_is_served_and_logs_that_its_answers_are_meaningless(tmp_path: Path) -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    shape = {"vocab_size": 50000, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps({**config, **shape}))
    with running(tmp_path, str(tmp_path / "shape"), "--load-format", "dummy", "--num-pages", "20") as daemon:
        requested = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=requested, timeout=240).json()
        assert re.search(r"<\d{4,5}>", answer["choices"][0]["message"]["content"])
        assert answer["usage"]["completion_tokens"] == 8
    lines = [line for line in daemon.wait_for_log("are meaningless").splitlines() if "are meaningless" in line]
    assert lines == ["weft: shape has random weights and the demo model's tokenizer: its answers are meaningless"]
