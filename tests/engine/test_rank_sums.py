"""Which sums over ranks a product begins on before they have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_plan import SPEC

from weft.engine.model.parts import Experts, Layer
from weft.engine.model.spec import ModelSpec, Shard
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation, Period, serial_period
from weft.engine.runner.rank_sums import RankSums
from weft.kernels.gemm_config import SPECIAL
from weft.kernels.gpu import KNOWN, compiling_for

TOKENS, SMS = 2048, 132


@pytest.fixture(autouse=True)
def _of_an_h200() -> Iterator[None]:
    with compiling_for(KNOWN["h200"]):
        yield


def told(spec: ModelSpec, period: Period) -> dict[tuple[int, str], bool]:
    """By layer and sum: whether its rows are told of."""
    found: dict[tuple[int, str], bool] = {}
    at = 0, ""

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def reduce(*_: Any, early: bool, **__: Any) -> None:
        found[at] = early

    width = torch.empty(512, spec.hidden_size, dtype=torch.bfloat16, device="meta")
    product = SimpleNamespace(weight=width, bias=None, q_norm=None, k_norm=None, gate=None, post_norm=None)
    weights: Any = SimpleNamespace(
        layers=[{op.name: product for op in spec.layer_operations(i)} for i in range(spec.num_layers)]
    )
    collectives: Any = SimpleNamespace(take=take, reduce=reduce)
    sums = RankSums(spec, weights, collectives, TOKENS, torch.bfloat16, torch.device("meta"))
    pipeline = Pipeline(period, spec)
    for layer, index in pipeline.unrolled():
        nano, op = pipeline.operations[index]
        if op.name.endswith("_reduce"):
            at = layer, op.name
            launch: Any = SimpleNamespace(
                operation=op, nano=nano, layer=layer, pipeline=pipeline, tokens=slice(nano.begin, nano.end), x=None,
                sumsq=None,
            )  # fmt: skip
            sums.reduce(launch, torch.empty(1, device="meta"), early=True)
    return found


def changed(spec: ModelSpec, name: str, **change: Any) -> Period:
    """The serial plan, one of its operations in another way."""
    period = serial_period(spec, TOKENS, SMS)

    def other(nano: NanoOperation) -> NanoOperation:
        return msgspec.structs.replace(nano, **change) if nano.operation == name else nano

    return msgspec.structs.replace(period, operations=tuple(map(other, period.operations)))


DENSE = replace(SPEC, num_layers=3, shard_of=Shard(0, 2))


def test_all_sums_but_the_last_layers_are_begun_on() -> None:
    assert told(DENSE, serial_period(DENSE, TOKENS, SMS)) == {
        (0, "o_reduce"): True,
        (0, "down_reduce"): True,
        (1, "o_reduce"): True,
        (1, "down_reduce"): True,
        (2, "o_reduce"): True,
        (2, "down_reduce"): False,
    }


def test_where_layers_differ_the_last_ones_sum_is_waited_for_too() -> None:
    spec = replace(DENSE, layers=(Layer(), Layer(experts=True), Layer()), experts=Experts(6, 3, 64))
    assert told(spec, serial_period(spec, TOKENS, SMS)) == {
        (0, "o_reduce"): True,
        (0, "down_reduce"): True,
        (1, "o_reduce"): False,  # the router reads it
        (1, "down_reduce"): True,
        (2, "o_reduce"): True,
        (2, "down_reduce"): False,
    }


@pytest.mark.parametrize(("name", "of"), [("gate_up", "o_reduce"), ("qkv", "down_reduce")])
@pytest.mark.parametrize("change", [{"config": SPECIAL}, {"sms": SMS - 12}])
def test_a_product_that_a_plan_cuts_otherwise_waits_for_its_sum(name: str, of: str, change: dict[str, Any]) -> None:
    other = "down_reduce" if of == "o_reduce" else "o_reduce"
    found = told(DENSE, changed(DENSE, name, **change))
    assert not any(found[layer, of] for layer in range(3))
    assert found[0, other]
