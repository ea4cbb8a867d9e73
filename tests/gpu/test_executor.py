"""The executor's pipelines against its serial plan, without an engine: on a GPU, or in order under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from interpreted import streams_in_order

from weft.autosearch.bench_protocol import Load
from weft.autosearch.gpu_bench import batch_of
from weft.engine.model.parts import Norm
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation, Period, serial_period
from weft.engine.runner.batch import Batch
from weft.engine.runner.cuda_executor import CudaExecutor
from weft.engine.runner.cuda_inputs import DeviceInputs, Layout
from weft.kernels.attention import AttentionShape
from weft.kernels.attention_triton import PER_SM, TritonAttention
from weft.kernels.gemm_config import SPECIAL, GemmConfig
from weft.kernels.gpu import gpu

PAGE = 16
SMALL = GemmConfig(64, 64, 64, 3, 4, 8)


def _spec(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        "LlamaForCausalLM", 160, hidden, inter, 2, heads, kv_heads, head_dim, 2048, Norm(1e-5), (Rope(1e4),),
        "bfloat16",
    )  # fmt: skip


@pytest.fixture
def streams(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with streams_in_order(monkeypatch) if device == "cpu" else torch.inference_mode():
        yield


class Machine:
    """Two layers with random weights, and one iteration whose last token of every request is sampled."""

    def __init__(self, spec: ModelSpec, load: Load, device: str) -> None:
        here = gpu()
        assert here is not None
        self.spec, self.load, self.sms = spec, load, here.sms
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        weights = load_weights(
            spec, Path(), device=torch.device(device), dtype=dtype, max_positions=2048, dummy_seed=1
        )  # fmt: skip
        self.batch = _sampled(batch_of(load, PAGE))
        requests, pages = self.batch.page_table.shape
        layout = Layout.of(load.tokens, load.tokens, spec.heads_per_kv, nano_batches=3)
        inputs = DeviceInputs(layout, torch.device(device), requests, pages)
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE, dtype, torch.device(device))
        self.executor = CudaExecutor(spec, weights, inputs, dtype, TritonAttention(shape, self.sms))
        pool = (int(self.batch.page_table.max()) + 1, spec.num_layers, 2, PAGE, spec.num_kv_heads, spec.head_dim)
        self._kv = torch.randn(pool, device=device).to(dtype)
        self.executor.last_token.copy_(torch.arange(load.tokens) % spec.vocab_size)

    def logits(self, period: Period, part_tokens: int = 2048) -> Tensor:
        """`[requests, V]`. part_tokens: where decode attention is cut."""
        period.check(self.spec, self.sms)
        kv, inputs, pipeline = self._kv.clone(), self.executor.inputs, Pipeline(period, self.spec)
        inputs._sent_pages[:] = 0
        inputs.page_table.zero_()
        inputs.send(
            self.batch, pipeline, num_kv_heads=self.spec.num_kv_heads, group=self.spec.heads_per_kv, per_sm=PER_SM,
            part_tokens=part_tokens,
        )  # fmt: skip
        rows = len(self.batch.sampled_rows)
        self.executor.logits.fill_(float("nan"))
        self.executor.forward(pipeline, kv, rows)
        return self.executor.logits[:rows].clone()


def _sampled(batch: Batch) -> Batch:
    rows = np.arange(batch.num_requests, dtype=np.int32)
    last = np.cumsum(batch.query_len, dtype=np.int32) - 1
    columns = {name: np.zeros(len(rows), values.dtype) for name, values in batch.sampling.columns.items()}
    zeros = np.zeros(len(rows), np.float32)
    sampling: Any = {"slots": batch.slots, "logit_tokens": last, "columns": columns, "uniform": zeros}
    ids = np.where(np.arange(batch.num_tokens) < batch.num_decodes, -1, np.arange(batch.num_tokens) % 160)
    return batch._replace(
        sampled_rows=rows, sampling=batch.sampling._replace(**sampling), token_ids=ids.astype(np.int32)
    )


def _pipeline(cuts: tuple[int, ...], config: GemmConfig, sms: int, attention_sms: int) -> Period:
    """While one nano-batch attends, the others go through the matrices, some of them a layer ahead."""
    ranges = list(zip((0, *cuts[:-1]), cuts, strict=True))
    operations = []
    for k, own in enumerate(ranges):
        operations += [NanoOperation(n, *own, sms - attention_sms, config=config) for n in ("o", "gate_up", "down")]
        operations.append(NanoOperation("qkv", *own, sms - attention_sms, next_layer=True, config=config))
        lane: Any = "memory" if k % 2 == 0 else "compute"
        operations += [NanoOperation(n, *own, attention_sms, lane, next_layer=True) for n in ("decode", "prefill")]
    # prefill attention of a range needs the keys of all before it: they stand before it in the list
    return Period(cuts[-1], tuple(operations), offload="gate_up")


def _serial(spec: ModelSpec, tokens: int, sms: int, config: GemmConfig | None) -> Period:
    period = serial_period(spec, tokens, sms)
    operations = (
        op if op.operation in ("decode", "prefill") else msgspec.structs.replace(op, config=config)
        for op in period.operations
    )
    return msgspec.structs.replace(period, operations=tuple(operations))


@pytest.mark.parametrize("cuts", [(128, 384), (256, 384), (128, 256, 384)])
@pytest.mark.usefixtures("streams")
def test_a_pipeline_gives_the_serial_plans_logits_to_the_bit(cuts: tuple[int, ...], device: str) -> None:
    large = device == "cuda"
    spec = _spec(1024, 3584, 8, 2, 128) if large else _spec(128, 192, 4, 2, 64)
    config = (SPECIAL if torch.cuda.get_device_capability()[0] == 9 else SMALL) if large else SMALL
    # less than the bucket: the last places are padding
    machine = Machine(spec, Load(380, 90 if large else 30, 200 if large else 60, 75), device)
    want = machine.logits(_serial(spec, cuts[-1], machine.sms, config))
    assert want.isfinite().all()
    assert want.std() > 0.01
    attention_sms = 20 if large else 2
    assert torch.equal(machine.logits(_pipeline(cuts, config, machine.sms, attention_sms)), want)
    if not large:  # the gate of each layer once, by the pipeline alone
        assert [gate.records for gate in machine.executor.gates] == [1] * spec.num_layers  # type: ignore[attr-defined]
    assert torch.equal(machine.logits(_serial(spec, cuts[-1], machine.sms, config)), want)


@pytest.mark.usefixtures("streams")
def test_where_the_order_of_sums_differs_logits_are_near(device: str) -> None:
    """Decode attention cut elsewhere; products with other feature tiles, whose partial squares group differently."""
    spec = _spec(1024, 3584, 8, 2, 128) if device == "cuda" else _spec(128, 192, 4, 2, 64)
    machine = Machine(spec, Load(256, 4, 600, 84), device)
    want = machine.logits(_serial(spec, 256, machine.sms, SMALL))
    other = GemmConfig(64, 128, 64, 3, 4, 8)
    for got in (
        machine.logits(_serial(spec, 256, machine.sms, SMALL), part_tokens=128),
        machine.logits(_serial(spec, 256, machine.sms, other)),
    ):
        assert float((got - want).norm() / want.norm()) < 2e-2
