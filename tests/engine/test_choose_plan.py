"""Which plan file an engine takes: the operator's where it fits, with a clear line where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.model.directory import read_spec
from weft.engine.model.parts import Quantization
from weft.engine.model.sums import Way
from weft.engine.plans import choose
from weft.engine.plans.choose import choose_plan
from weft.engine.plans.plan import Period, Plan, Target, model_key, serial_period
from weft.engine.runner.resolve import resolve
from weft.kernels.gpu import KNOWN, compiling_for

SPEC = read_spec(EngineConfig().model_path)
HERE = Target("NVIDIA H200", 132, model_key(SPEC), "bfloat16", "0123456789abcdef")


def _file(folder: Path, *tokens: int, target: Target = HERE, dense: int = 0) -> str:
    periods = tuple(serial_period(SPEC, n, 132) for n in tokens)
    Plan(target, "1024:512", periods, dense_batch=dense).save(folder / "plan.json")
    return str(folder / "plan.json")


def _tokens(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [p.tokens for p in plan.periods]


def test_without_an_operators_limit_the_plan_names_the_dense_batch(tmp_path: Path) -> None:
    plan = choose_plan(_file(tmp_path, 1792, 2048, dense=2048), SPEC, HERE, None)
    assert _tokens(plan) == [1792, 2048]
    assert plan is not None
    assert plan.dense_batch == 2048


def test_with_a_limit_the_pipelines_for_more_tokens_are_left_out(tmp_path: Path) -> None:
    assert _tokens(choose_plan(_file(tmp_path, 1792, 2048), SPEC, HERE, 1792)) == [1792]
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 1024"):
        choose_plan(_file(tmp_path, 1792), SPEC, HERE, 1024)


@pytest.mark.parametrize(
    ("field", "other"),
    [("gpu", "NVIDIA H100"), ("sms", 114), ("model", "another"), ("dtype", "float16"), ("kernels", "fedcba9876543210")],
)
def test_a_plan_for_something_else_is_refused_with_a_line_and_the_serial_plan_runs(
    field: str, other: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = msgspec.structs.replace(HERE, **{field: other})
    assert choose_plan(_file(tmp_path, 1792, target=theirs), SPEC, HERE, None) is None
    assert f"it was made for {field} {other!r}" in caplog.text
    assert "the serial plan runs" in caplog.text


def test_a_plan_without_pipelines_and_no_plan_mean_the_serial_plan(tmp_path: Path) -> None:
    assert choose_plan(_file(tmp_path), SPEC, HERE, None) is None
    assert choose_plan("serial", SPEC, HERE, None) is None
    assert choose_plan("auto", SPEC, HERE, None) is None


@pytest.mark.parametrize("sums", [{}, {"o_reduce": "scatter_gather"}])
def test_a_plan_with_collectives_that_no_executor_runs_is_refused_with_a_line(
    sums: dict[str, Way], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = SPEC.shard(0, 2)
    here = msgspec.structs.replace(HERE, model=model_key(half))
    plan = Plan(here, "1024:512", (), sums=sums)
    plan = msgspec.structs.replace(plan, periods=(serial_period(plan.spec_of(half), 1792, 132),))
    plan.save(tmp_path / "plan.json")
    assert choose_plan(str(tmp_path / "plan.json"), half, here, None) is None
    (line,) = (r.getMessage() for r in caplog.records if "is not used" in r.getMessage())
    first = "o_scatter (reduce_scatter), o_gather (all_gather)" if sums else "o_reduce (all_reduce)"
    assert f"pipelines cannot run {first}, down_reduce (all_reduce) yet; the serial plan runs" in line
    monkeypatch.setattr(choose, "COLLECTIVES", {"all_reduce", "reduce_scatter", "all_gather"})
    assert choose_plan(str(tmp_path / "plan.json"), half, here, None) == plan


def test_an_impossible_pipeline_is_an_error(tmp_path: Path) -> None:
    whole = serial_period(SPEC, 1792, 132)
    Plan(HERE, "1024:512", (Period(1792, whole.operations[1:]),)).save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="must compute qkv once"):
        choose_plan(str(tmp_path / "plan.json"), SPEC, HERE, None)


def test_a_cpu_runs_no_plan_but_reads_the_one_it_is_given(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", plan=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot read the plan"):
        resolve(config, read_spec(config.model_path))
    shipped = next(iter(choose.SHIPPED.glob("*.json")))
    config = EngineConfig(device="cpu", plan=str(shipped))
    assert resolve(config, read_spec(config.model_path)).plan is None


def test_a_context_whose_tables_do_not_fit_is_one_line() -> None:
    config = EngineConfig(device="cpu")
    spec = replace(read_spec(config.model_path), max_positions=2**40)
    with pytest.raises(OutOfMemory, match="lower --max-model-len"):
        resolve(config, spec)
    assert resolve(config.model_copy(update={"max_model_len": 512}), spec).max_model_len == 512


def test_a_plan_for_16_bits_is_not_for_the_same_model_in_fp8() -> None:
    device = torch.device("meta")
    with compiling_for(KNOWN["h200"]):
        plain = choose.target_of(SPEC, device, torch.bfloat16)
        eight = choose.target_of(replace(SPEC, quantization=Quantization("fp8")), device, torch.bfloat16)
    assert plain.dtype == "bfloat16"
    assert eight != plain
