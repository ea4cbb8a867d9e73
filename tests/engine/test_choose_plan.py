"""The plan file that an engine uses: the operator's if it fits, with a clear line if it does not."""

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
from weft.engine.model.reductions import Reduction
from weft.engine.model.spec import ModelSpec
from weft.engine.plans import choose
from weft.engine.plans.choose import choose_plan
from weft.engine.plans.plan import Period, Plan, Target, model_key, serial_period
from weft.engine.runner.options import resolve as resolving
from weft.engine.runner.options.resolve import resolve
from weft.kernels.common.gpu import KNOWN, compiling_for
from weft.kernels.formats.fp8 import E4M3

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


def test_with_a_limit_the_pipelines_for_more_tokens_are_dropped(tmp_path: Path) -> None:
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


def test_a_plan_without_pipelines_and_no_plan_mean_the_serial_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "weft.engine"):
        assert choose_plan(_file(tmp_path), SPEC, HERE, None) is None
    assert "found no pipeline faster than the serial plan" in caplog.text
    assert choose_plan("serial", SPEC, HERE, None) is None
    assert choose_plan("auto", SPEC, HERE, None) is None


def test_a_shipped_plan_made_with_other_kernel_code_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "SHIPPED", tmp_path)
    _file(tmp_path, 1792)
    line = "a shipped plan for this model was made with other kernel code; the serial plan runs (weft search makes a"
    assert _tokens(choose_plan("auto", SPEC, HERE, None)) == [1792]
    assert choose_plan("auto", SPEC, msgspec.structs.replace(HERE, model="another"), None) is None
    assert line not in caplog.text
    assert choose_plan("auto", SPEC, msgspec.structs.replace(HERE, kernels="fedcba9876543210"), None) is None
    assert line in caplog.text


def _of_two_ranks(sums: dict[str, Reduction]) -> tuple[ModelSpec, Plan]:
    half = SPEC.shard(0, 2)
    here = msgspec.structs.replace(HERE, model=model_key(half))
    plan = Plan(here, "1024:512", (), sums=sums)
    return half, msgspec.structs.replace(plan, periods=(serial_period(plan.spec_of(half), 1792, 132),))


def test_a_plan_with_collectives_that_no_executor_runs_is_refused_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, plan = _of_two_ranks({"o_reduce": "scatter_gather"})
    plan.save(tmp_path / "plan.json")
    assert choose_plan(str(tmp_path / "plan.json"), half, plan.target, None) is None
    (line,) = (r.getMessage() for r in caplog.records if "is not used" in r.getMessage())
    assert "pipelines cannot run o_scatter (reduce_scatter), o_gather (all_gather) yet; the serial plan runs" in line
    monkeypatch.setattr(choose, "COLLECTIVES", {"all_reduce", "reduce_scatter", "all_gather"})
    assert choose_plan(str(tmp_path / "plan.json"), half, plan.target, None) == plan


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_on_a_gpu_takes_a_plan_and_waits_for_all_its_pipelines(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, plan = _of_two_ranks({})
    monkeypatch.setattr(resolving, "target_of", lambda *_: plan.target)
    plan.save(tmp_path / "plan.json")
    config = EngineConfig(
        device="cuda", plan=str(tmp_path / "plan.json"), tensor_parallel_size=2, wait_for_plan=wait,
    )  # fmt: skip
    with compiling_for(KNOWN["h200"]):
        found = resolve(config, half)
    assert found.plan == plan
    assert found.wait_for_plan


def test_with_batch_invariance_only_an_explicit_plan_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "target_of", lambda *_: HERE)
    file = _file(tmp_path, 1792)
    named = EngineConfig(device="cuda", batch_invariant=True, plan=file)
    with compiling_for(KNOWN["h200"]):
        plan = resolve(named, SPEC).plan
        assert _tokens(plan) == [1792]
        assert resolve(named.model_copy(update={"plan": "auto"}), SPEC).plan is None
        spec = replace(SPEC, layers=tuple(replace(layer, window=512) for layer in SPEC.layers))
        with pytest.raises(ConfigError, match="--batch-invariant excludes plans for a model with attention windows"):
            resolve(named, spec)


def test_an_eager_engine_runs_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "target_of", lambda *_: HERE)
    eager = EngineConfig(device="cuda", enforce_eager=True)
    with compiling_for(KNOWN["h200"]):
        resolved = resolve(eager, SPEC)
        assert (resolved.plan, resolved.enforce_eager) == (None, True)
        with pytest.raises(ConfigError, match="pipelines run in CUDA graphs: leave out --enforce-eager"):
            resolve(eager.model_copy(update={"plan": _file(tmp_path, 1792)}), SPEC)


def test_an_impossible_pipeline_is_an_error(tmp_path: Path) -> None:
    whole = serial_period(SPEC, 1792, 132)
    Plan(HERE, "1024:512", (Period(1792, whole.operations[1:]),)).save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="must compute qkv once"):
        choose_plan(str(tmp_path / "plan.json"), SPEC, HERE, None)


def test_a_cpu_runs_no_plan_but_reads_the_given_one(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", plan=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot read the plan"):
        resolve(config, read_spec(config.model_path))
    shipped = next(iter(choose.SHIPPED.glob("*.json")))
    config = EngineConfig(device="cpu", plan=str(shipped))
    assert resolve(config, read_spec(config.model_path)).plan is None


def test_a_context_whose_tables_do_not_fit_is_a_one_line_error() -> None:
    config = EngineConfig(device="cpu")
    spec = replace(read_spec(config.model_path), max_positions=2**40)
    with pytest.raises(OutOfMemory, match="lower --max-model-len"):
        resolve(config, spec)
    assert resolve(config.model_copy(update={"max_model_len": 512}), spec).max_model_len == 512


def test_a_plan_for_16_bits_is_not_for_the_same_model_in_fp8_nor_for_pages_in_fp8() -> None:
    device = torch.device("meta")
    with compiling_for(KNOWN["h200"]):
        plain = choose.target_of(SPEC, device, torch.bfloat16)
        eight = choose.target_of(replace(SPEC, quantization=Quantization("fp8")), device, torch.bfloat16)
        pages = choose.target_of(SPEC, device, torch.bfloat16, E4M3)
    assert plain.dtype == "bfloat16"
    assert len({plain, eight, pages}) == 3
    assert plain.kernels != eight.kernels == pages.kernels  # other code of FP8 kernels outdates only plans of these


def test_attention_in_one_launch_is_refused_if_unsupported() -> None:
    config = EngineConfig(model_preset="opt-1.3b", load_format="dummy", pod="auto", plan="serial")
    spec = read_spec(config.model_path)
    with pytest.raises(ConfigError, match="--pod auto needs a Hopper GPU"):
        resolve(EngineConfig(device="cpu", pod="auto"), SPEC)
    pytest.importorskip("triton")
    on_a_gpu = config.model_copy(update={"kv_cache_gib": 1.0, "dtype": "bfloat16"})
    with compiling_for(KNOWN["h200"]):
        assert resolve(on_a_gpu, spec).pod == "auto"
        with pytest.raises(ConfigError, match="--batch-invariant"):
            resolve(on_a_gpu.model_copy(update={"batch_invariant": True}), spec)
    with compiling_for(KNOWN["a100"]), pytest.raises(ConfigError, match="Hopper"):
        resolve(on_a_gpu, spec)
