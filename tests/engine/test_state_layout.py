"""`StateLayout`: states go into pages of the pool and come back, in any page, without touching others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import StateSpec, StateTensor

GDN = StateSpec((StateTensor("conv", (24, 3), "bfloat16"), StateTensor("recurrent", (3, 4, 8), "float32")), 64)
MAMBA = StateSpec((StateTensor("conv", (7, 3), "float32"), StateTensor("recurrent", (5, 3), "float16")), 48)


def _random(layout: StateLayout, rows: int) -> list[dict[str, torch.Tensor]]:
    return [
        {t.name: torch.randn(rows, *t.shape).to(getattr(torch, t.dtype)) for t in (state.tensors if state else ())}
        for state in layout.states
    ]


@settings(max_examples=40, deadline=None)
@given(
    states=st.lists(st.sampled_from([GDN, MAMBA, None]), min_size=1, max_size=6),
    page_bytes=st.sampled_from([16, 50, 64, 400, 4096, 1 << 16]),
    rows=st.integers(0, 3),
)
def test_states_come_back_and_nothing_else_changes(states: list[StateSpec | None], page_bytes: int, rows: int) -> None:
    layout = StateLayout.of(states, page_bytes)
    pool = torch.randint(0, 256, (1 + 3 * layout.pages, page_bytes), dtype=torch.uint8)
    before = pool.clone()
    table = (1 + torch.randperm(3 * layout.pages))[: rows * layout.pages].view(rows, layout.pages)
    values = _random(layout, rows)
    layout.scatter(pool, table, values)
    back = layout.gather(pool, table)
    assert [layer.keys() for layer in back] == [layer.keys() for layer in values]
    for got, want in zip(back, values, strict=True):
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)
    others = [page for page in range(len(pool)) if page not in table]
    assert torch.equal(pool[others], before[others])
    assert layout.nbytes <= layout.pages * page_bytes


def test_a_unit_that_fits_a_page_lies_in_one_page() -> None:
    layout = StateLayout.of([GDN] * 5, 300)
    for tensors in layout.runs:
        conv, recurrent = tensors
        assert sum(run.size for run in conv) == 24 * 3 * 2
        assert len(conv) == 1
        assert all(run.size % (4 * 8 * 4) == 0 and run.begin % 16 == 0 for run in recurrent)
    assert layout.pages == 10, "two heads per page, and the convolutions where they fit"


def test_qwen_3_5_4b_takes_the_pages_that_its_bytes_need() -> None:
    layer = StateSpec((StateTensor("conv", (8192, 3), "bfloat16"), StateTensor("recurrent", (32, 128, 128), "float32")))
    layout = StateLayout.of(([layer] * 3 + [None]) * 8, 2 << 20)
    assert (layout.pages, layout.block) == (25, 64)
    assert layout.nbytes == 24 * (32 * 65536 + 8192 * 3 * 2)


def test_a_model_without_states_takes_no_page() -> None:
    layout = StateLayout.of([None] * 4, 4096)
    assert (layout.pages, layout.nbytes, layout.id, layout.block) == (0, 0, "", 1)
    assert layout.gather(torch.zeros(2, 4096, dtype=torch.uint8), torch.zeros(3, 0, dtype=torch.int64)) == [{}] * 4


def test_the_block_of_all_layers_is_a_multiple_of_each() -> None:
    assert StateLayout.of([GDN, None, MAMBA], 4096).block == 192


@pytest.mark.parametrize("other", [
    StateSpec((*GDN.tensors[:1], StateTensor("recurrent", (3, 4, 8), "bfloat16"))),
    StateSpec((*GDN.tensors[:1], StateTensor("recurrent", (3, 8, 4), "float32"))),
])  # fmt: skip
def test_another_dtype_or_shape_is_another_layout(other: StateSpec) -> None:
    assert StateLayout.of([GDN, None], 4096).id != StateLayout.of([other, None], 4096).id
