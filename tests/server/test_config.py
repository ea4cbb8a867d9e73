"""`ServeConfig`: flat, described, and the engine is told only its own part."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from weft.engine.config import EngineConfig
from weft.server.config import ServeConfig


def test_engine_part_is_an_engine_config() -> None:
    engine = ServeConfig(port=1, max_num_seqs=7, page_size=16).engine
    assert type(engine) is EngineConfig
    assert (engine.max_num_seqs, engine.page_size) == (7, 16)


def test_model_is_served_under_its_own_name_unless_told_otherwise() -> None:
    assert ServeConfig().model_names == ["demo"]
    assert ServeConfig(model="/models/Llama").model_names == ["Llama"]
    assert ServeConfig(served_model_name=["a", "b"]).model_names == ["a", "b"]


def test_every_option_is_described() -> None:
    assert all(field.description for field in ServeConfig.model_fields.values())


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(ServeConfig(api_key=["secret"], admin_api_key="secret"))


@pytest.mark.parametrize("bad", [{"port": 70000}, {"api_key": [""]}, {"drain_timeout": -1}, {"unknown": 1}], ids=str)
def test_values_that_cannot_work_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ServeConfig.model_validate(bad)
