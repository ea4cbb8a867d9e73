"""`ServeConfig` is flat and described, and the engine receives only its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.options import load


def test_engine_part_is_an_engine_config() -> None:
    engine = ServeConfig(port=1, max_num_seqs=7, page_size=16).engine
    assert type(engine) is EngineConfig
    assert (engine.max_num_seqs, engine.page_size) == (7, 16)


def test_a_model_is_served_under_its_own_name_by_default() -> None:
    assert ServeConfig().model_names == ["demo"]
    assert ServeConfig(model="/models/Llama").model_names == ["Llama"]
    assert ServeConfig(served_model_name=["a", "b"]).model_names == ["a", "b"]


def test_every_option_is_described() -> None:
    assert all(field.description for field in ServeConfig.model_fields.values())


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(ServeConfig(api_key=["secret"], admin_api_key="secret"))


@pytest.mark.parametrize("bad", [{"port": 70000}, {"api_key": [""]}, {"drain_timeout": -1}, {"unknown": 1}], ids=str)
def test_impossible_values_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ServeConfig.model_validate(bad)


def test_an_automatic_limit_keeps_an_objective() -> None:
    config = ServeConfig.model_validate({"max_num_seqs": "auto:64", "slo": ["ITL:p99:0.05s"]})
    assert (config.engine.adaptive_limit, config.engine.sequence_limit, config.engine.slo) == (
        True,
        64,
        ["itl:p99:50ms"],
    )
    assert ServeConfig(max_num_seqs="auto", slo=["itl:mean:20ms"]).sequence_limit is None
    assert (ServeConfig(max_num_seqs=8).adaptive_limit, ServeConfig(max_num_seqs=8).sequence_limit) == (False, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "auto"}, "--max-num-seqs auto needs --slo"),
        ({"slo": ["itl:p99:50ms"]}, "--slo needs --max-num-seqs auto"),
        ({"max_num_seqs": "auto", "slo": ["ttft:p99:50ms"]}, "only limits the time between tokens"),
        ({"max_num_seqs": "auto", "slo": ["itl:p99"]}, "--slo: 'itl:p99' is not MEASURE:STATISTIC:LIMIT"),
        ({"max_num_seqs": "auto", "slo": ["itl:p101:5ms"]}, "'p101'"),
        ({"max_num_seqs": "auto:5000", "slo": ["itl:p99:5ms"]}, "--max-num-seqs"),
        ({"max_num_seqs": "0"}, "--max-num-seqs"),
    ],
)
def test_an_objective_without_an_automatic_limit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ServeConfig, options, None)


def test_a_model_keeps_its_name_when_its_link_leads_to_other_weights(tmp_path: Path) -> None:
    """New weights are served by a restart of the engines, and clients keep using the model's name."""
    link = tmp_path / "current"
    config = ServeConfig(model=str(link))
    names = []
    for weights in ("march", "april"):
        (tmp_path / weights).mkdir()
        link.unlink(missing_ok=True)
        link.symlink_to(weights)
        names += config.model_names
    assert names == ["current", "current"]


def test_a_model_is_named_after_its_directory_or_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ServeConfig(model="a/b/").model_names == ["b"]
    assert ServeConfig(model=".").model_names == [tmp_path.name]
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    assert ServeConfig(model=str(snapshot)).model_names == ["org/name"]
