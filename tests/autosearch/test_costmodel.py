"""The cost model against the tables that NanoFlow prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.autosearch import cost_model
from weft.autosearch.accelerators import ACCELERATORS, accelerator
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Resource
from weft.engine.model.parts import Norm
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec

LLAMA2_70B = ModelSpec(
    "LlamaForCausalLM", 32000, 8192, 28672, 80, 64, 8, 128, 4096, Norm(1e-5), (Rope(1e4),), "float16",
)  # fmt: skip
A100 = accelerator("a100")

# name: MemSize/MemBW, Compute/MemBW, NetBW/MemBW, in the order of Table 1
TABLE_1 = [
    (0.018, 139, 0.33), (0.026, 200, 0.39), (0.040, 156, 0.30), (0.024, 295, 0.268), (0.020, 206, 0.19),
    (0.015, 225, 0.23), (0.015, 281, 0.23), (0.038, 107, 0.24), (0.036, 246, 0.19), (0.043, 218, 0.17),
    (0.040, 417, 0.25), (0.035, 486, 0.32), (0.050, 190, 0.067),
]  # fmt: skip

# GFLOP, GB loaded, GB over the network; T_comp, T_mem, T_net in ms
TABLE_2 = {
    "qkv": (27487.8, 19.5, 0, 11.01, 1.22, 0),
    "o": (21990.2, 16.1, 0, 8.81, 1.01, 0),
    "gate_up": (153931.6, 96.6, 0, 61.67, 6.04, 0),
    "down": (76965.8, 49.7, 0, 30.84, 3.11, 0),
    "decode": (3665.9, 462.2, 0, 1.47, 28.89, 0),
    "prefill": (916.3, 2.1, 0, 0.37, 0.13, 0),
    "network": (18.8, 75.2, 75.2, 0.01, 4.70, 31.33),
    "total": (None, None, None, 114.17, 45.09, 31.33),
}


@pytest.mark.parametrize(("row", "printed"), list(zip(ACCELERATORS, TABLE_1, strict=True)), ids=lambda v: str(v)[:30])
def test_ratios_of_table_1(row: cost_model.Accelerator, printed: tuple[float, float, float]) -> None:
    # The paper rounds or cuts the last digit.
    assert row.mem_seconds == pytest.approx(printed[0], abs=0.00101)
    # H200: 989,000 / 4,800 is 206, MI300: 1,307,000 / 5,300 is 247
    assert row.gflops / row.mem_gbs == pytest.approx(printed[1], abs=1.01)
    assert row.net_gbs / row.mem_gbs == pytest.approx(printed[2], abs=0.0101)


@pytest.mark.parametrize("name", list(TABLE_2))
def test_estimates_of_table_2(name: str) -> None:
    """LLaMA-2-70B on 8 A100, dense batch 2048: the numbers are those of prompts of 512 and answers of 1024 tokens."""
    costs = cost_model.operation_costs(LLAMA2_70B, cost_model.Usage(2048, 512, 1024), gpus=8)
    cost = next(c for c in [*costs, cost_model.total(costs)] if c.name == name)
    gflop, mem, net, *milliseconds = TABLE_2[name]
    if gflop is not None:
        assert cost.gflop == pytest.approx(gflop, rel=3e-3)
        assert cost.mem_gb == pytest.approx(mem, rel=3e-3, abs=0.15)
        assert cost.net_gb == pytest.approx(net, rel=1e-3)
    seconds = cost.seconds(A100, 8)
    estimates = [seconds[r] * 1e3 for r in (Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK)]
    assert estimates == pytest.approx(milliseconds, rel=1e-3, abs=0.011)


def test_every_operation_is_bound_as_table_2_prints_in_bold() -> None:
    costs = cost_model.operation_costs(LLAMA2_70B, cost_model.Usage(2048, 512, 1024), gpus=8)
    bound = {c.name: c.bound(A100, 8) for c in costs}
    assert bound.pop("decode") is Resource.MEMORY
    assert bound.pop("network") is Resource.NETWORK
    assert set(bound.values()) == {Resource.COMPUTE}


def test_optimal_throughput_of_the_paper() -> None:
    # §3.5 says 280 TFLOP/s; its 1857 tokens/s/GPU follows from 260.
    assert cost_model.optimal_throughput(260e12, 70e9) == pytest.approx(1857, abs=0.5)


def test_large_models_are_bound_by_compute_and_small_batches_by_memory() -> None:
    assert cost_model.t_ratio(2048, 70e9, A100, 8) == pytest.approx(0.04 * 8 * 312e12 / (2 * 2048 * 70e9))
    assert cost_model.classify(2048, 70e9, A100, 8) is Resource.COMPUTE
    assert cost_model.classify(128, 8e9, A100) is Resource.MEMORY


def test_power_bounds_a_gemm_longer_than_its_arithmetic_on_the_h200() -> None:
    h200 = accelerator("H200")
    product = next(
        c for c in cost_model.operation_costs(LLAMA2_70B, cost_model.Usage(2048, 1, 1)) if c.name == "gate_up"
    )
    assert product.power_seconds(h200) == pytest.approx(product.gflop / 1e3 * 0.871 / (700 - 122))
    assert product.power_seconds(h200) > product.seconds(h200)[Resource.COMPUTE]  # type: ignore[operator]
    assert product.joules(A100) is None


def test_an_unknown_accelerator_is_named() -> None:
    with pytest.raises(ConfigError, match="'tpu'; known: v100"):
        accelerator("tpu")


def test_recurrences_are_costs_of_their_own() -> None:
    """A decode moves the states twice, at any context; a request holds two of them."""
    spec = read_spec(PRESETS / "qwen3-next-80b-a3b")
    states = sum(state.nbytes for state in spec.states if state is not None)
    assert states / 2**20 == pytest.approx(73.7, abs=0.1)
    assert sum(state is not None for state in spec.states) == 36
    short, long = (
        {cost.name: cost for cost in cost_model.operation_costs(spec, cost_model.Usage(64, length, length))}
        for length in (64, 64 * 1024)
    )
    assert short["state_step"].mem_gb == pytest.approx(2 * states * 32 / 1e9, rel=0.02)
    assert long["state_step"] == short["state_step"]
    assert long["decode"].mem_gb > 100 * short["decode"].mem_gb
    assert {"state_in", "state_scan", "state_out", "output_gate"} <= set(short)
    without = replace(spec, layers=tuple(replace(layer, state=None) for layer in spec.layers))
    usage = cost_model.Usage(64, 1024, 1024)
    assert cost_model.most_tokens(spec, usage, 400) < cost_model.most_tokens(without, usage, 400)
