"""The options of several models: one form for flags, environment and file, and the resulting configuration of each
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.daemon import cli
from weft.server.daemon.placement import place
from weft.server.options import load

TWO = ["/m/a memory_share=0.7", "/m/b --served-model-name=x served_model_name=y max_num_seqs=3 prefix-caching=false"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configuration that `weft serve` would run."""
    found: list[ServeConfig] = []
    monkeypatch.setattr(cli, "_located", lambda config: config)
    monkeypatch.setattr("weft.server.daemon.daemon.run", lambda config: found.append(config) or 0)
    return found


def reported(config: ServeConfig) -> list[tuple[str, list[str], Any, bool, float]]:
    return [
        (each.model, each.model_names, each.max_num_seqs, each.prefix_caching, share)
        for each, share in zip(config.each, config.memory_shares, strict=True)
    ]


EXPECTED = [("/m/a", ["a"], 9, True, 0.7), ("/m/b", ["x", "y"], 3, False, pytest.approx(0.3))]


def test_flag_variable_and_file_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[ServeConfig]
) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(
        "max_num_seqs: 9\nmodels:\n  - /m/a memory_share=0.7\n  - model: /m/b\n    served_model_name: [x, y]\n"
        "    max_num_seqs: 3\n    prefix_caching: false\n"
    )
    assert reported(load(ServeConfig, {}, file)) == EXPECTED
    common = ["serve", "--max-num-seqs", "9"]
    assert cli.main([*common, "--model", TWO[0], "--model", TWO[1]]) == 0
    assert cli.main([*common, "--models", *TWO]) == 0
    monkeypatch.setenv("WEFT_MODELS", ", ".join(TWO))
    assert cli.main(common) == 0
    assert [reported(config) for config in served] == [EXPECTED] * 3


def test_one_model_is_given_as_before(monkeypatch: pytest.MonkeyPatch, served: list[ServeConfig]) -> None:
    monkeypatch.setenv("WEFT_MODELS", "/m/a, /m/b")
    for arguments in (["/m/c"], ["--model", "/m/c"], ["/m/c", "--model", "/m/d"]):
        assert cli.main(["serve", *arguments]) == 0
        assert (served[-1].model, served[-1].models, len(served[-1].each)) == ("/m/c", [], 1)
    monkeypatch.delenv("WEFT_MODELS")
    monkeypatch.setenv("WEFT_MODEL", "/m/c")
    assert cli.main(["serve", "--model", "/m/a", "--model", "/m/b"]) == 0
    assert [each.model for each in served[-1].each] == ["/m/a", "/m/b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ["/m/a port=1"]}, "port is not an option of a single model"),
        ({"models": ["/m/a share=1"]}, "share is not an option of a single model"),
        ({"models": ["/m/a max_num_seqs=0"]}, "number 1: --max-num-seqs: "),
        ({"models": ["/m/a", "/m/b memory_share"]}, "must be option=value"),
        ({"models": ["memory_share=1"]}, "must start with a model"),
        ({"models": ["/m/a memory_share=1", "/m/b"]}, "no memory is left for number 2"),
        ({"models": ["/m/a memory_share=1.5"]}, "--memory-share: "),
        ({"models": ["/m/a 'x"]}, "o closing quotation"),
        ({"models": ["/m/a"], "model": "/m/b"}, "give --model or --models, not both"),
        ({"models": ["/m/a"], "served_model_name": ["x"]}, "inside --models"),
        ({"models": ["/m/a host_kv_gib=1 prefix_caching=false"]}, "number 1: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_options_are_one_line_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(ServeConfig, options, None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_models_and_model_together_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "/m/a", "--models", "/m/b"]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_worker_with_the_configuration_finds_the_same_models() -> None:
    config = load(ServeConfig, {"models": TWO, "max_num_seqs": "9"}, None)
    again = ServeConfig.model_validate_json(config.model_dump_json())
    assert reported(again) == reported(config) == EXPECTED
    assert again.engine_numbers == [range(1), range(1, 2)]


def test_shares_are_equal_by_default_among_models_awake_together() -> None:
    def shares(*models: str, **options: Any) -> list[float]:
        return load(ServeConfig, {"models": list(models), **options}, None).memory_shares

    assert shares("/m/a", "/m/b") == [0.5, 0.5]
    assert shares("/m/a", "/m/b", max_awake_models="1") == [1, 1]
    assert shares("/m/a memory_share=0.6", "/m/b memory_share=0.6") == [0.6, 0.6]
    assert ServeConfig().memory_shares == [1]


def engines(config: ServeConfig, gpus: list[str], cores: int = 8) -> list[EngineConfig]:
    return place(config, gpus, set(range(cores)), {})


def test_engines_are_numbered_and_get_their_models_part(tmp_path: Path) -> None:
    models = ["/m/a memory_share=0.75 replicas=2", "/m/b served_model_name=o/x memory_share=0.25 page_size=16"]
    placed = engines(load(ServeConfig, {"models": models, "ssd_kv_path": str(tmp_path), "host_kv_gib": "1"}, None), [])
    assert [e.share.engine for e in placed] == [0, 1, 2]
    assert [(e.model, e.share.memory, e.share.sharers, e.page_size) for e in placed] == [
        ("/m/a", 0.75, 2, 64), ("/m/a", 0.75, 2, 64), ("/m/b", 0.25, 1, 16)
    ]  # fmt: skip
    assert [e.ssd_kv_path for e in placed] == [
        str(tmp_path / "a" / "engine-0"), str(tmp_path / "a" / "engine-1"), str(tmp_path / "o--x")
    ]  # fmt: skip
    assert all(e.share.sleeps and not e.share.cpus for e in placed)
    assert {e.cpu_threads for e in placed} == {2}


def test_threads_are_divided_among_models_that_may_be_awake() -> None:
    config = load(ServeConfig, {"models": ["/m/a", "/m/b", "/m/c"], "max_awake_models": "1"}, None)
    assert [e.cpu_threads for e in engines(config, [])] == [7, 7, 7]


def test_engines_know_whether_another_model_may_be_awake_with_them() -> None:
    def shares(**options: str) -> list[tuple[int, int]]:
        config = load(ServeConfig, {"models": ["/m/a", "/m/b", "/m/c"], **options}, None)
        return [(e.share.models, e.share.awake) for e in engines(config, ["0"])]

    assert shares() == [(3, 3)] * 3
    assert shares(max_awake_models="1") == [(3, 1)] * 3


def test_models_share_gpus() -> None:
    placed = engines(load(ServeConfig, {"models": ["/m/a data_parallel_size=2", "/m/b"]}, None), ["0", "1"])
    assert [(e.share.gpu, e.share.memory, e.cpu_threads) for e in placed] == [
        ("0", 0.5, None), ("1", 0.5, None), ("", 0.5, None)
    ]  # fmt: skip


def test_an_entry_may_give_any_list_as_one_value() -> None:
    entry = "demo served_model_name=b lora_modules=sql=/sql classifier_from_token=yes"
    config = ServeConfig.model_validate({"models": ["demo", entry]}).each[1]
    assert (config.served_model_name, config.lora_modules) == (["b"], ["sql=/sql"])
    assert config.classifier_from_token == ["yes"]


def test_two_models_of_one_name_are_refused() -> None:
    config = load(ServeConfig, {"models": ["/m/a", "/m/b served_model_name=a"]}, None)
    with pytest.raises(ConfigError, match="two models are named a"):
        engines(config, [])


@pytest.mark.parametrize(("gpus", "admin", "sleeps"), [([], "k", True), (["0"], "k", True), (["0"], None, False)])
def test_a_single_model_can_sleep_if_an_operator_may_request_it(
    gpus: list[str], admin: str | None, sleeps: bool
) -> None:
    assert engines(ServeConfig(admin_api_key=admin), gpus)[0].share.sleeps == sleeps
