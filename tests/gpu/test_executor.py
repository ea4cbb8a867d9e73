"""The executor's pipelines against its serial plan, without an engine: on a GPU, or in order under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Role
from weft.engine.model.parts import Experts, Layer, Norm, Quantization
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.plans import pipeline
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation, Period, serial_period
from weft.engine.runner.cpu.cpu_executor import CpuExecutor, CpuInputs
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.cuda_layers import CudaLayers
from weft.engine.runner.cuda.cuda_runner import _Graphs
from weft.engine.runner.cuda.layer_launch import Fused
from weft.engine.runner.cuda.rank_sums import RankSums
from weft.engine.runner.device.collectives import DeviceCollectives
from weft.engine.runner.iteration.attention_lists import AttentionGrid
from weft.engine.runner.iteration.attention_path import AttentionPath
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.input_layout import Layout
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.torch_backend import TorchAttention
from weft.kernels.attention.triton_backend import PER_SM, TritonAttention
from weft.kernels.common.gpu import gpu
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.tools.kernels.fp8_operands import row_values

PAGE = 16
SMALL = GemmConfig(64, 64, 64, 3, 4, 8)
TALL = GemmConfig(128, 64, 64, 3, 4, 8)


def _spec(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        "LlamaForCausalLM", 160, hidden, inter, 2, heads, kv_heads, head_dim, 2048, Norm(1e-5), (Rope(1e4),),
        "bfloat16",
    )  # fmt: skip


def _expert_specs(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, ModelSpec]:
    """All layers of experts, some of them, and gpt-oss's."""
    plain = replace(_spec(hidden, inter, heads, kv_heads, head_dim), layers=(Layer(experts=True),))
    return {
        "mixtral": replace(plain, architecture="MixtralForCausalLM", experts=Experts(5, 2, inter)),
        "qwen2-moe": replace(
            plain, architecture="Qwen2MoeForCausalLM", qkv_bias=True, layers=(Layer(), Layer(experts=True)),
            experts=Experts(6, 3, inter // 2, normalise=False, shared_size=inter // 2, shared_gate=True),
        ),
        "gpt-oss": replace(
            plain, architecture="GptOssForCausalLM", qkv_bias=True, o_bias=True, activation="swiglu_oai", sinks=True,
            experts=Experts(8, 4, inter, router="top_softmax", router_bias=True, bias=True),
        ),
    }  # fmt: skip


@pytest.fixture
def streams(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with streams_in_order(monkeypatch) if device == "cpu" else torch.inference_mode():
        yield


class Machine:
    """Two layers with random weights, and one iteration whose last token of every request is sampled."""

    def __init__(
        self, spec: ModelSpec, load: Load, device: str, *, bucket: int = 0, invariant: bool = False,
        collectives: DeviceCollectives | None = None, whole: ModelSpec | None = None,
    ) -> None:  # fmt: skip
        """bucket: of the longest period that is run, if that is more than the load's tokens. whole: the model that
        `spec` is a rank's shard of."""
        here = gpu()
        assert here is not None
        self.spec, self.load, self.sms, self.device = spec, load, here.sms, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        weights = load_weights(
            spec, Path(), device=torch.device(device), dtype=dtype, max_positions=2048, dummy_seed=1
        )  # fmt: skip
        self.batch = _sampled(batch_of(load, PAGE))
        requests, pages = self.batch.page_table.shape
        layout = Layout.of(max(bucket, load.tokens), load.tokens, spec.heads_per_kv, nano_batches=3)
        inputs = DeviceInputs(layout, torch.device(device), requests, pages)
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE, dtype, torch.device(device),
            sinks=spec.sinks)  # fmt: skip
        self.weights = weights
        attention = TritonAttention(shape, self.sms)
        self.layers = CudaLayers(
            spec, weights, inputs, dtype, attention, invariant=invariant, collectives=collectives
        )  # fmt: skip
        self.executor = CudaExecutor(self.layers)
        whole = whole or spec
        pool = (int(self.batch.page_table.max()) + 1, spec.num_layers, 2, PAGE, whole.num_kv_heads, spec.head_dim)
        first = spec.shard_of.kv_part * spec.num_kv_heads
        torch.manual_seed(20)
        kv = torch.randn(pool, device=device)[..., first : first + spec.num_kv_heads, :]
        self._kv = kv.to(dtype).contiguous()
        self.executor.last_token.copy_(torch.arange(load.tokens) % spec.vocab_size)

    def logits(self, period: Period, split_tokens: int = 2048) -> Tensor:
        """`[requests, V]`. split_tokens: the split size of decode attention."""
        period.check(self.spec, self.sms)
        kv, inputs, pipeline = self._kv.clone(), self.executor.inputs, Pipeline(period, self.spec)
        inputs._sent_pages[:] = 0
        inputs.page_table.zero_()
        inputs.send(
            self.batch, pipeline, AttentionGrid(self.spec.num_kv_heads, self.spec.heads_per_kv, PER_SM, split_tokens)
        )
        rows = len(self.batch.sampled_rows)
        self.executor.logits.fill_(float("nan"))
        self.executor.forward(pipeline, kv, rows)
        return self.executor.logits[:rows].clone()

    def reference_logits(self) -> Tensor:
        """The same logits from the CPU's executor, in float32."""
        batch, spec = self.batch, self.spec
        weights = load_weights(
            spec, Path(), device=torch.device(self.device), dtype=self.executor.x.dtype, max_positions=2048,
            dummy_seed=1,
        )  # fmt: skip
        for tensor in _floats(weights):
            tensor.data = tensor.float()
        kv = self._kv.cpu().float()
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE, torch.float32, torch.device("cpu"),
            sinks=spec.sinks,
        )  # fmt: skip
        attention = TorchAttention(shape)
        executor = CpuExecutor(spec, weights, kv, attention)
        ids = np.where(
            batch.token_ids < 0, self.executor.last_token.cpu().numpy()[batch.slots[_rows(batch)]], batch.token_ids
        )
        inputs = CpuInputs(
            torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping), attention.prepare(batch),
        )  # fmt: skip
        x, sumsq = executor.forward(inputs)
        return executor.logits(x, sumsq, torch.from_numpy(batch.sampling.logit_tokens.astype(np.int64)))


def _rows(batch: Batch) -> Any:
    """The request of each token."""
    return np.repeat(np.arange(batch.num_requests), batch.query_len)


def _floats(weights: Weights) -> Iterator[Tensor]:
    """Its tensors of 16 bits, moved to the CPU."""
    products = (product for layer in weights.layers for product in layer.values())
    for tensor in (weights.embedding, weights.norm, weights.lm_head, *(t for p in products for t in p.tensors())):
        if tensor is not None:
            tensor.data = tensor.data.cpu()
            yield tensor
    for table in weights.rotary:
        table.data = table.data.cpu()


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


def _pipeline(
    cuts: tuple[int, ...], config: GemmConfig | None, sms: int, attention_sms: int, spec: ModelSpec, offload: str
) -> Period:
    """While one nano-batch attends, the others run their GEMMs, some of them a layer ahead."""
    ranges = list(zip((0, *cuts[:-1]), cuts, strict=True))
    operations = []
    roles = Role.PROJECTION, Role.EXPERTS
    products = [o.name for o in spec.layer_operations() if o.role in roles and o.name != "qkv"]
    for k, own in enumerate(ranges):
        operations += [NanoOperation(n, *own, sms - attention_sms, config=config) for n in products]
        operations.append(NanoOperation("qkv", *own, sms - attention_sms, next_layer=True, config=config))
        lane: Any = "memory" if k % 2 == 0 else "compute"
        operations += [NanoOperation(n, *own, attention_sms, lane, next_layer=True) for n in ("decode", "prefill")]
    # prefill attention of a range needs the keys of all before it, which precede it in the list
    return Period(cuts[-1], tuple(operations), offload=offload)


def _serial(spec: ModelSpec, tokens: int, sms: int, config: GemmConfig | None) -> Period:
    period = serial_period(spec, tokens, sms)
    operations = (
        op if op.operation in ("decode", "prefill") else msgspec.structs.replace(op, config=config)
        for op in period.operations
    )
    return msgspec.structs.replace(period, operations=tuple(operations))


# Interpreted, the last one stands for the others in the day run: it has ranges of both widths, on both lanes.
MORE = () if torch.cuda.is_available() else pytest.mark.nightly


@pytest.mark.parametrize(
    "cuts", [pytest.param((128, 384), marks=MORE), pytest.param((256, 384), marks=MORE), (128, 256, 384)]
)
@pytest.mark.usefixtures("streams")
def test_a_pipeline_gives_the_serial_plans_logits_to_the_bit(cuts: tuple[int, ...], device: str) -> None:
    large = device == "cuda"
    spec = _spec(1024, 3584, 8, 2, 128) if large else _spec(128, 192, 4, 2, 64)
    config = (SPECIAL if torch.cuda.get_device_capability()[0] == 9 else SMALL) if large else SMALL
    # less than the bucket: the last rows are padding
    machine = Machine(spec, Load(380, 90 if large else 30, 200 if large else 60, 75), device)
    want = machine.logits(_serial(spec, cuts[-1], machine.sms, config))
    assert want.isfinite().all()
    assert want.std() > 0.01
    attention_sms = 20 if large else 2
    assert torch.equal(machine.logits(_pipeline(cuts, config, machine.sms, attention_sms, spec, "gate_up")), want)
    if not large:  # the gate of each layer once, by the pipeline alone
        assert [gate.records for gate in machine.executor.gates] == [1] * spec.num_layers  # type: ignore[attr-defined]
    assert torch.equal(machine.logits(_serial(spec, cuts[-1], machine.sms, config)), want)


@pytest.mark.usefixtures("streams")
def test_a_batch_invariant_pipeline_gives_the_serial_plans_logits_to_the_bit_for_any_tiles(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = device == "cuda"
    if not large:  # numpy adds up a product in an order that follows its shape
        monkeypatch.setattr(CudaLayers, "config", lambda *_: SMALL)
        monkeypatch.setattr(CudaLayers, "_tiles", lambda *_: SMALL)
    spec = _spec(1024, 3584, 8, 2, 128) if large else _spec(128, 192, 4, 2, 64)
    load = Load(380, 90 if large else 30, 200 if large else 60, 75)
    machine = Machine(spec, load, device, invariant=True)
    want = machine.logits(serial_period(spec, 384, machine.sms))
    assert want.std() > 0.01
    tiles = SPECIAL if large and torch.cuda.get_device_capability()[0] == 9 else SMALL
    attention_sms = 20 if large else 2
    for config in (None, tiles):
        pipelined = _pipeline((128, 256, 384), config, machine.sms, attention_sms, spec, "gate_up")
        assert torch.equal(machine.logits(pipelined), want)


@pytest.mark.usefixtures("streams", "rounded")
@pytest.mark.nightly
def test_a_pipeline_of_fp8_gemms_gives_the_serial_plans_logits_to_the_bit(device: str) -> None:
    large = device == "cuda"
    sizes = (1024, 3584, 8, 2, 128) if large else (128, 192, 2, 1, 128)
    spec = replace(_spec(*sizes), quantization=Quantization("fp8", at_load=True))
    config = GemmConfig(128, 256, 128, 4, 4, special=True) if large else GemmConfig(64, 256, 128, 3, 8)
    machine = Machine(spec, Load(380, 90, 200, 75) if large else Load(250, 30, 60, 75), device)
    cuts = (128, 384) if large else (128, 256)
    want = machine.logits(_serial(spec, cuts[-1], machine.sms, config))
    assert want.isfinite().all()
    assert want.std() > 0.01
    got = machine.logits(_pipeline(cuts, config, machine.sms, 20 if large else 2, spec, "gate_up"))
    assert torch.equal(got, want)


@pytest.mark.usefixtures("streams", "rounded")
def test_attention_that_writes_operands_changes_no_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a pass over rows of 16 bits: with all rows, and when unread rows leave the last layer."""
    large = device == "cuda"
    sizes = (1024, 3584, 8, 2, 128) if large else (128, 128, 2, 1, 128)
    spec = replace(_spec(*sizes), quantization=Quantization("fp8", at_load=True))
    load = Load(380, 90, 200, 75) if large else Load(60, 10, 20, 31)
    period = serial_period(spec, 384 if large else 64, gpu().sms)  # type: ignore[union-attr]
    found = []
    for quantizes, unread_from in ((True, 0), (False, 0), (True, 10**9)):
        with monkeypatch.context() as patch:
            patch.setattr(TritonAttention, "quantizes", quantizes)
            patch.setattr(pipeline, "UNREAD_FROM", unread_from)
            machine = Machine(spec, load, device)
            assert ("a" in machine.layers.activations) != quantizes
            found.append(machine.logits(period))
    assert found[0].isfinite().all()
    assert found[0].std() > 0.01
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    machine.executor.fill(torch.randn_like(machine.executor.x))  # to time layers without an embedding
    made = row_values(machine.layers.whole.attended)  # type: ignore[arg-type]
    assert 0.9 < float(made.std()) < 1.1


@pytest.mark.usefixtures("streams")
def test_unread_rows_leave_the_last_layer_and_no_bit_of_the_others_changes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = device == "cuda"
    spec = _spec(1024, 3584, 8, 2, 128) if large else _spec(64, 64, 2, 1, 64)
    machine = Machine(spec, Load(380, 90, 200, 75) if large else Load(140, 10, 20, 61), device)
    period = serial_period(spec, 384 if large else 256, machine.sms)
    x = machine.executor.states(Pipeline(period, spec))
    x.fill_(float("nan"))
    got = machine.logits(period)
    rows = len(machine.batch.sampled_rows)
    assert x[:rows].isfinite().all()
    assert x[rows:].isnan().all()
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "UNREAD_FROM", 10**9)
        assert torch.equal(machine.logits(period), got)


@pytest.mark.usefixtures("streams")
def test_if_the_order_of_sums_differs_logits_are_near(device: str) -> None:
    """Decode attention is split differently; GEMMs have other feature tiles, whose partial squares group
    differently."""
    spec = _spec(1024, 3584, 8, 2, 128) if device == "cuda" else _spec(128, 192, 4, 2, 64)
    machine = Machine(spec, Load(256, 4, 600, 84), device)
    want = machine.logits(_serial(spec, 256, machine.sms, SMALL))
    other = GemmConfig(64, 128, 64, 3, 4, 8)
    for got in (
        machine.logits(_serial(spec, 256, machine.sms, SMALL), split_tokens=128),
        machine.logits(_serial(spec, 256, machine.sms, other)),
    ):
        assert float((got - want).norm() / want.norm()) < 2e-2


@pytest.mark.usefixtures("streams")
def test_norms_of_heads_are_batch_invariant(device: str) -> None:
    """The same bits in buckets with tiles of their own; as near the references as when the GEMM's epilogue norms."""
    large = device == "cuda"
    spec = replace(_spec(1024, 3584, 8, 4, 128) if large else _spec(64, 64, 2, 1, 64), qk_norm="head")
    load = Load(28, 5, 20, 11)
    buckets = (32, 64, 128, 256, 512, 2048) if large else (32, 64)
    machine = Machine(spec, load, device, bucket=buckets[-1], invariant=True)
    want, *others = (machine.logits(serial_period(spec, bucket, machine.sms)) for bucket in buckets)
    for other in others:
        assert torch.equal(other, want)
    reference_logits = machine.reference_logits()
    assert reference_logits.std() > 0.01
    assert float((want.cpu() - reference_logits).norm() / reference_logits.norm()) < 2e-2


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
@pytest.mark.usefixtures("streams")
def test_models_of_experts_give_the_references_logits(family: str, device: str) -> None:
    large = device == "cuda"
    spec = _expert_specs(*((1024, 896, 8, 2, 128) if large else (128, 96, 4, 2, 64)))[family]
    load, bucket = (Load(90, 20, 60, 40), 128) if large else (Load(28, 5, 20, 11), 32)
    machine = Machine(spec, load, device)
    got = machine.logits(serial_period(spec, bucket, machine.sms)).cpu()
    want = machine.reference_logits()
    assert want.std() > 0.01
    # For most rows: if two experts are near a tie, rounding chooses.
    differences = (got - want).norm(dim=1) / want.norm(dim=1)
    assert differences.median() < 2e-2
    assert float((got - want).norm() / want.norm()) < (0.2 if large else 2e-2)


@pytest.mark.parametrize("cuts", [(128, 256)])
@pytest.mark.usefixtures("streams")
def test_nano_batches_of_experts_give_the_serial_plans_logits_to_the_bit(cuts: tuple[int, ...], device: str) -> None:
    large = device == "cuda"
    spec = _expert_specs(*((1024, 896, 8, 2, 128) if large else (64, 64, 2, 1, 64)))["mixtral"]
    config = (SPECIAL if torch.cuda.get_device_capability()[0] == 9 else SMALL) if large else SMALL
    machine = Machine(spec, Load(250, 30, 60, 75) if large else Load(150, 6, 20, 61), device)
    want = machine.logits(_serial(spec, cuts[-1], machine.sms, config))
    assert want.isfinite().all()
    got = machine.logits(_pipeline(cuts, config, machine.sms, 20 if large else 2, spec, "router"))
    assert torch.equal(got, want)
    period = _pipeline(cuts, config, machine.sms, 2, spec, "router")
    other = SMALL if config.tokens == TALL.tokens else TALL
    uneven = tuple(
        msgspec.structs.replace(op, config=other if op.operation == "experts_down" else config)
        for op in period.operations
    )
    with pytest.raises(ConfigError, match="the same token ranges"):
        machine.logits(msgspec.structs.replace(period, operations=uneven))


@pytest.mark.usefixtures("streams")
def test_a_plan_for_layers_of_two_kinds_is_refused() -> None:
    spec = _expert_specs(128, 96, 4, 2, 64)["qwen2-moe"]
    with pytest.raises(ConfigError, match="one kind of layer"):
        Pipeline(_pipeline((128, 256), SMALL, 4, 2, spec, "router"), spec)


def test_a_gemm_sends_its_partial_sums_if_their_sum_is_of_the_same_tokens() -> None:
    spec = _spec(64, 128, 4, 2, 32).shard(0, 2)
    requested: list[tuple[int, int | None]] = []

    def push(*_: Any, turn: int, begin: int | None, among: int | None) -> bool:
        assert among == (None if begin is None else 256)  # all send as an iteration of this many tokens does
        requested.append((turn, begin))
        return True

    sums: Any = SimpleNamespace(
        _pushable={"o"},
        _sum_after={"o": "o_reduce"},
        _collectives=SimpleNamespace(push=push),
        _buffer=lambda _: SimpleNamespace(turn=1),
        _begin_if_interleaved=RankSums._begin_if_interleaved,
    )
    rows = SimpleNamespace(activations={"a": torch.zeros(256, 4)})
    names = [o.name for o in spec.layer_operations()]
    assert "o_reduce" in names
    whole, halves = ((0, 256),), ((0, 128), (128, 256))
    for cuts, of_o, want in (
        (whole, whole, [(1, None)]),
        (halves, halves, [(1, 0), (1, 128)]),  # collectives decide whether they do
        (halves, whole, []),
    ):
        period = Period(
            256,
            tuple(
                NanoOperation(name, *own, 4) for name in names for own in (of_o if name == "o" else cuts)
            ),
        )  # fmt: skip
        pipeline = Pipeline(period, spec)
        requested.clear()
        for nano, op in pipeline.operations:
            if op.name == "o":
                launch: Any = SimpleNamespace(
                    pipeline=pipeline, operation=op, nano=nano, projection=SimpleNamespace(weight=None, bias=None),
                    tokens=slice(nano.begin, nano.end), rows=rows,
                )  # fmt: skip
                assert RankSums._try_push(sums, launch, {}) is bool(want)
        assert requested == want


def test_one_launch_of_attention_takes_the_path_of_the_iteration() -> None:
    requested: list[str] = []
    layers: Any = SimpleNamespace(
        _attend=lambda attend, _: attend(),
        attention=SimpleNamespace(
            decode=lambda: requested.append("decode"),
            prefill=lambda: requested.append("prefill"),
            attend=lambda together: requested.append("together" if together else "lists"),
        ),
    )
    ways: tuple[Fused | None, ...] = (None, "lists", "together", "tiles")
    for way in ways:
        launch: Any = SimpleNamespace(fused=way)
        CudaLayers._decode(layers, launch)
        CudaLayers._prefill(layers, launch)
    assert requested == ["decode", "prefill", "lists", "together", "prefill"]


def test_an_iteration_replays_the_graph_of_its_path() -> None:
    graphs: Any = _Graphs("model", "sample", {"together": "both", "tiles": "one list"})
    alone: Any = _Graphs("model", "sample", {})
    wanted = {"pod_together": "both", "pod_tiles": "one list", "pod_in_turn": "model", "chunks": "model"}
    for path, want in wanted.items():
        assert graphs.of(AttentionPath(path)) == want
        assert alone.of(AttentionPath(path)) == "model"
    assert graphs.of(None) == "model"
    with_adapters = graphs._replace(adapted="adapted")
    assert with_adapters.of(AttentionPath("pod_together")) == "both"
    assert with_adapters.of(AttentionPath("pod_in_turn"), adapted=True) == "adapted"
