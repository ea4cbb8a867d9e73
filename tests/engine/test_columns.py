"""A sampling field is declared once: a column added to the declaration reaches every sampler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.model.directory import read_spec
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.device.sampling import Sampling
from weft.engine.runner.iteration import batch, input_layout
from weft.engine.runner.iteration.attention_lists import AttentionGrid
from weft.engine.runner.iteration.batch import Batch, SamplingInputs
from weft.engine.runner.iteration.input_layout import Layout
from weft.engine.scheduling import slots
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import COLUMNS, Column, SamplingParams
from weft.kernels.reference import sampling

VOCAB = 200
PARAMS = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "presence_penalty": 1.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.25, "logprobs": 3,
}  # fmt: skip


class Wider(SamplingParams, frozen=True, kw_only=True):
    """`SamplingParams` with two more fields."""

    lift: float = 0.0
    """bias of the token with the highest id"""
    top_n: int = 0


LIFT = Column("lift", np.float32, lambda p: getattr(p, "lift", 0.0))
TOP_N = Column("top_n", np.int32, lambda p: getattr(p, "top_n", 0), sampler=True)


@pytest.fixture
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a column for each of `Wider`'s fields to the declaration."""
    for module in (slots, batch, input_layout):
        monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, LIFT, TOP_N))


def request(order: int, params: SamplingParams, tokens: int = 5) -> Request:
    return Request(
        handle=order, token_ids=np.arange(tokens, dtype=np.int32), prompt_len=tokens, params=params,
        max_total_tokens=tokens + 9, priority=0, order=order, arrival=0.0, salt="", stop_ids=(), seed=order,
    )  # fmt: skip


def schedule(*params: SamplingParams) -> Batch:
    """The prefill iteration of a request for each of the parameters."""
    pool = PagePool(64, 16, PrefixIndex("test"))
    scheduler = Scheduler(SlotTable(8, 64, 16), pool, max_num_batched_tokens=64, prefix_caching=False)
    for order, wanted in enumerate(params):
        scheduler.add(request(order, wanted))
    made = scheduler.schedule(1)
    assert made is not None
    return made


def test_names_are_unique_and_free_rows_have_defaults() -> None:
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    table, plain = SlotTable(2, 64, 16), SamplingParams()
    slot = table.assign(request(0, plain), np.zeros(0, np.int32), 0)
    for name, column in table.columns.items():
        assert column[slot] == column[1 - slot], name


def test_every_declared_column_reaches_the_batch() -> None:
    s = schedule(SamplingParams(), SamplingParams(**PARAMS)).sampling
    assert set(s.columns) == {column.name for column in COLUMNS}
    expected = {
        "temperature": [1.0, 0.5], "top_k": [0, 7], "top_p": [1.0, 0.25], "min_p": [0.0, 0.125],
        "presence": [0.0, 1.5], "frequency": [0.0, -0.5], "repetition": [1.0, 1.25], "counted": [False, True],
        "logprobs": [-1, 3],
    }  # fmt: skip
    assert {name: s.columns[name].tolist() for name in expected} == expected
    for column in COLUMNS:
        assert s.columns[column.name].dtype == column.dtype, column.name
    assert {k: v.dtype for k, v in SamplingInputs.none().columns.items()} == {k: v.dtype for k, v in s.columns.items()}


def test_a_reused_row_holds_nothing_of_its_last_request() -> None:
    table = SlotTable(1, 64, 16)
    slot = table.assign(request(0, SamplingParams(**PARAMS)), np.zeros(0, np.int32), 0)
    table.retire(slot)
    table.release(slot)
    assert table.assign(request(1, SamplingParams()), np.zeros(0, np.int32), 0) == slot
    for column in COLUMNS:
        assert table.columns[column.name][slot] == np.dtype(column.dtype).type(column.of(SamplingParams()))


def test_the_samplers_take_only_words_of_four_bytes() -> None:
    with pytest.raises(ValueError, match=r"column wide: .* not float64"):
        Column("wide", np.float64, lambda _: 0.0, sampler=True)


def test_both_samplers_accept_the_declared_columns() -> None:
    triton = pytest.importorskip("weft.kernels.sampling.sampler")
    names = set(schedule(SamplingParams()).sampling.sampler_arguments())
    for sample in (sampling.sample, triton.sample):
        taken = set(sample.__annotations__) - {"logits", "return"}
        assert names <= taken, "a column that no sampler knows"
        assert taken - names <= {"out", "scratch", "counts", "slots", "bad"}, "a parameter that nobody declares"


@pytest.mark.usefixtures("_declared")
def test_an_added_column_reaches_the_sampling_of_the_cpu_runner(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adjust, sample = Sampling.adjust, sampling.sample
    seen: list[list[int]] = []

    def lifted(self: Sampling, logits: torch.Tensor, batch: Batch) -> None:
        adjust(self, logits, batch)
        logits[:, -1] += self.to_device(batch.sampling.columns["lift"])

    def watched(logits: torch.Tensor, *, top_n: torch.Tensor, **rest: Any) -> torch.Tensor:
        seen.append(top_n.tolist())
        return sample(logits, **rest)

    monkeypatch.setattr(Sampling, "adjust", lifted)
    monkeypatch.setattr(sampling, "sample", watched)
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    for handle, params in enumerate((Wider(max_tokens=3, **GREEDY), Wider(max_tokens=3, lift=1e6, top_n=4))):
        prompt = np.array([5, 6, 7], np.int32).tobytes()
        harness.engine.add(AddRequest(handle=handle, prompt_token_ids=prompt, params=params))
        harness.tokens[handle] = []
    harness.run()
    last = harness.engine.spec.vocab_size - 1
    assert harness.tokens[1] == [last] * 3
    assert last not in harness.tokens[0]
    assert seen == [[0, 4]] * 3


@pytest.mark.usefixtures("_declared")
def test_an_added_column_reaches_the_slab_of_the_gpu(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: ModelSpec = read_spec(tiny_model("yi"))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **{**options, "pin_memory": False}))
    inputs = DeviceInputs(Layout.of(64, 8, spec.heads_per_kv), torch.device("cpu"), 8, 4)
    made = schedule(SamplingParams(), Wider(lift=2.0, top_n=9, **PARAMS))
    pipeline = Pipeline(serial_period(spec, 64, 8), spec)
    inputs.send(made, pipeline, AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, 1))
    arguments = inputs.sampler_arguments(2)
    expected = {
        "temperature": [1.0, 0.5], "top_k": [0, 7], "top_p": [1.0, 0.25], "min_p": [0.0, 0.125], "top_n": [0, 9],
    }  # fmt: skip
    assert {name: arguments[name].tolist() for name in expected} == expected
    assert arguments["uniform"].tolist() == made.sampling.uniform.tolist()
    assert arguments["top_n"].dtype == torch.int32
    assert "lift" not in inputs.column, "no sampler takes it: it stays on the host"
    assert inputs.column["temperature"][2:].tolist() == [0.0] * 6
    assert inputs.column["slots"][:2].tolist() == made.sampling.slots.tolist()
