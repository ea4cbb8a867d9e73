"""LoRA adapters on a GPU, without one: lists of rows by adapter, slots in memory, and what a start refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.adapter import Adapter
from weft.engine.model.implementation import choose_spec
from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.options.resolve import resolve, served_as
from weft.kernels.common.gpu import KNOWN, compiling_for
from weft.kernels.matmul.adapter_work import max_items, sort_rows, tile_rows
from weft.kernels.reference.adapters import LowRank

Made = Callable[[str], Path]


@given(st.lists(st.integers(-1, 5), max_size=300), st.integers(0, 400))
def test_every_row_is_in_one_item_of_its_slot(slots: list[int], padding: int) -> None:
    tokens, ranks = max(1, len(slots) + padding), np.arange(10, 16, dtype=np.int32)
    slot_of = np.array(slots, np.int32)
    rows, items, (adapted, total) = sort_rows(slot_of, ranks, tokens)
    assert sorted(rows.tolist()) == list(range(len(slots)))
    assert total == len(items) <= max_items(tokens, len(ranks))
    seen: list[int] = []
    for i, (slot, first, count, rank) in enumerate(items.tolist()):
        assert (slot >= 0) == (i < adapted)
        assert rank == (ranks[slot] if slot >= 0 else 0)
        assert 0 < count <= tile_rows(tokens)
        assert set(slot_of[rows[first : first + count]].tolist()) == {slot}
        seen += range(first, first + count)
    assert seen == list(range(len(slots)))


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("mixtral", {}, "has experts"),
        ("phi", {}, "parallel"),
        ("llama2", {"batch_invariant": True, "max_num_batched_tokens": 512}, "--batch-invariant"),
        ("llama2", {"quantization": "fp8"}, "in FP8"),
    ],
)
def test_a_gpu_refuses_what_it_does_not_compute(
    tiny_model: Made, family: str, options: dict[str, Any], why: str
) -> None:
    config = EngineConfig(model=str(tiny_model(family)), enable_lora=True, **options)
    with compiling_for(KNOWN["h200"]), pytest.raises(ConfigError, match=f"LoRA adapters.*{why}") as error:
        resolve(config, served_as(choose_spec(config)[0], config))
    assert "\n" not in str(error.value)


def test_a_gpu_has_as_many_slots_as_adapters_in_memory(tiny_model: Made) -> None:
    for options, slots in (({"enable_lora": True, "max_loras": 3}, 3), ({}, 0)):
        config = EngineConfig(model=str(tiny_model("llama2")), **options)
        with compiling_for(KNOWN["h200"]):
            assert resolve(config, served_as(choose_spec(config)[0], config)).adapter_slots == slots


def test_numbers_that_become_infinite_are_refused(tiny_model: Made) -> None:
    """Rows without the adapter multiply its B by zero, so an infinite number would change them."""
    spec, _ = choose_spec(EngineConfig(model=str(tiny_model("llama2"))))
    slots = AdapterSlots(spec, 2, 16, torch.float16, torch.device("meta"))

    def staged(largest: float) -> torch.Tensor:
        b = torch.full((spec.hidden_size, 2), largest)
        matrix = LowRank(torch.ones(2, spec.num_heads * spec.head_dim), b, 0, 1)
        layers = ({"o": (matrix,)}, *({} for _ in range(spec.num_layers - 1)))
        return slots.stage(Adapter(layers, 2)).packed

    assert staged(60000.0).max() == 60000
    with pytest.raises(ModelError, match="too large for float16"):
        staged(1e6)
