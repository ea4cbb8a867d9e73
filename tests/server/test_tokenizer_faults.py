"""Faults of a model's tokenizer are reported at start, not to each client."""

from __future__ import annotations

from pathlib import Path

import pytest
from vocabularies import CHAT_TEMPLATE, byte_level, wrapped

from weft.engine.errors import ModelError
from weft.server.text.tokenizer import Tokenizer


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(wrapped(byte_level(), chat_template=template))


def test_a_broken_chat_template_is_reported_with_its_line() -> None:
    tokenizer = with_template("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    assert not tokenizer.can_chat
    (fault,) = tokenizer.faults(10**6)
    assert fault.startswith("the model's chat template is broken: line 2: ")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{{ raise_exception('a system message comes first') }}"])
def test_a_valid_template_is_not_broken(template: str) -> None:
    tokenizer = with_template(template)
    assert tokenizer.can_chat
    assert tokenizer.faults(10**6) == []


def test_a_model_without_a_template_cannot_chat() -> None:
    assert not with_template(None).can_chat
    assert with_template(None).faults(10**6) == []


def test_a_vocabulary_smaller_than_the_tokenizers_is_reported() -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    size = tokenizer.vocab_size
    assert tokenizer.faults(size) == []
    (fault,) = tokenizer.faults(size - 1)
    assert f"has {size} tokens, but the model only {size - 1};" in fault


def test_a_directory_without_a_tokenizer_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer: it needs tokenizer\.json or tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_a_pointer_in_place_of_a_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        Tokenizer.load(tmp_path)
