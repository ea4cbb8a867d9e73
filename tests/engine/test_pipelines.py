"""`Pipelines`: the pipeline that serves an iteration whose nano-batches must not divide a tile of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from weft.engine.config import EngineConfig
from weft.engine.model.directory import read_spec
from weft.engine.plans.plan import NanoOperation, Period, Plan, Target, model_key
from weft.engine.runner.iteration.batch import Batch, SamplingInputs
from weft.engine.runner.iteration.pipelines import Pipelines

SPEC = read_spec(EngineConfig().model_path)


def _plan() -> Plan:
    operations = []
    for own in ((0, 256), (256, 512)):
        operations += [NanoOperation(op.name, *own, 100) for op in SPEC.layer_operations()]
    target = Target("NVIDIA H200", 132, model_key(SPEC), "bfloat16", "0123456789abcdef")
    return Plan(target, "test", (Period(512, tuple(operations)),))


def _batch(decodes: int, chunk: int) -> Batch:
    """Decodes, then a prompt's first tokens."""
    query_len = np.array([1] * decodes + [chunk] * (chunk > 0), np.int32)
    kv_len = np.array([40] * decodes + [chunk] * (chunk > 0), np.int32)
    none, slots = np.zeros(0, np.int32), np.arange(len(query_len), dtype=np.int32)
    ids = np.arange(int(query_len.sum()), dtype=np.int32)
    return Batch(
        1, decodes, slots, slots, query_len, kv_len, ids, ids, ids.astype(np.int64), slots[:, None], none,
        SamplingInputs.none(), (), (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("decodes", "chunk", "undivided", "pipelined"),
    [
        (100, 0, 64, True),  # nothing to divide
        (20, 400, 1, True),
        (20, 400, 64, True),  # 246 tokens before the cut, 256 if all decodes are before it
        (20, 400, 96, False),  # 192 or 288 would take 54 or 42 decodes
        (0, 512, 64, True),  # the cut is between two tiles
        (0, 500, 128, True),
        (0, 500, 96, False),
    ],
)
def test_an_iteration_whose_cut_cannot_move_uses_the_serial_plan(
    decodes: int, chunk: int, undivided: int, pipelined: bool
) -> None:
    pipelines = Pipelines(SPEC, 512, 132, _plan(), undivided)
    assert (pipelines.of(_batch(decodes, chunk)) in pipelines.planned) == pipelined
