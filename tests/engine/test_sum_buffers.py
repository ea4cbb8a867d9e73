"""Where partial sums are stored: neighbouring sums separately, GEMMs of one sum together, for any layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weft.engine.demo import MODEL_PATH
from weft.engine.model.directory import read_spec
from weft.engine.model.parts import Experts, Layer, Placement
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.cuda.sum_buffers import EMBEDDING_BUFFER, sum_buffers

PLAIN = read_spec(MODEL_PATH)
SPARSE = replace(
    PLAIN, layers=(Layer(), Layer(experts=True)), experts=Experts(4, 2, 64, shared_size=64), num_layers=4
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "sums"),
    [(PLAIN, 2), (replace(PLAIN, placement=Placement.PARALLEL), 1), (SPARSE, 2)],
    ids=["plain", "parallel", "experts"],
)
def test_sums_alternate_and_gemms_of_one_sum_share_its_buffer(spec: ModelSpec, sums: int) -> None:
    spec = spec.shard(0, 2)
    turns = [EMBEDDING_BUFFER]
    for layer, places in enumerate(sum_buffers(spec)):
        operations = list(spec.layer_operations(layer))
        assert set(places) == {o.name for o in operations if o.target == "x"}
        left: list[str] = []
        for op in operations:
            if op.name not in places:
                continue
            turn, _, last = places[op.name]
            if op.kernel == "all_reduce":
                assert last == left[-1]
                assert [places[name].turn for name in left] == [turn] * len(left)
                assert [places[name].first for name in left] == [True] + [False] * (len(left) - 1)
                turns.append(turn)
                left = []
            else:
                left.append(op.name)
        assert not left
    assert len(turns) == 1 + sums * spec.num_layers
    assert all(a != b for a, b in pairwise(turns))


def test_one_rank_has_no_buffers() -> None:
    assert sum_buffers(PLAIN) == []
