"""`KvLayout` and its users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.config import EngineConfig
from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.memory.extent import Geometry
from weft.engine.memory.kv_layout import KvLayout, page_rows
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.options.resolve import ResolvedConfig, resolve

LAYOUT = KvLayout(num_layers=3, planes=2, page_size=5, num_kv_heads=1, head_dim=24, dtype=torch.bfloat16)


def test_a_pool_is_pages_of_all_layers() -> None:
    memory = torch.zeros(4 * LAYOUT.page_bytes, dtype=torch.uint8)
    kv = LAYOUT.view(memory)
    assert kv.shape == LAYOUT.shape(4) == (4, 3, 2, 5, 1, 24)
    assert kv.dtype == torch.bfloat16
    assert page_rows(kv).shape == (4, LAYOUT.page_bytes)
    kv[2].fill_(1.0)
    assert page_rows(kv)[2].all() == page_rows(kv)[2].any()
    assert not page_rows(kv)[[0, 1, 3]].any()


def test_bytes_follow_the_dtype() -> None:
    wide = replace(LAYOUT, dtype=torch.float32)
    assert wide.page_bytes == 2 * LAYOUT.page_bytes == 2 * 5 * LAYOUT.token_bytes
    assert LAYOUT.pages_in(2.99 * LAYOUT.page_bytes) == 2


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 4}, {"planes": 1}, {"page_size": 6}, {"num_kv_heads": 2}, {"head_dim": 8}, {"dtype": torch.int8}],
)
def test_every_field_is_in_the_identity(change: dict[str, object]) -> None:
    assert replace(LAYOUT, **change).id != LAYOUT.id  # type: ignore[arg-type]


def test_the_identity_is_the_one_stored_on_disk() -> None:
    assert LAYOUT.id == "torch.bfloat16|3x2x5x1x24"


def test_host_slots_and_extents_hold_a_page() -> None:
    kv = LAYOUT.view(torch.zeros(3 * LAYOUT.page_bytes, dtype=torch.uint8))
    copies = CpuCopyEngine(kv, 2)
    try:
        assert copies.sizes.page == LAYOUT.page_bytes
    finally:
        copies.close()
    geometry = Geometry.fitting(LAYOUT.page_size, LAYOUT.page_bytes, b"x" * 16, 1 << 20)
    assert geometry.extent_bytes >= LAYOUT.page_bytes


def test_pages_may_have_another_dtype_than_the_computation(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(config: EngineConfig, spec: ModelSpec) -> ResolvedConfig:
        resolved = resolve(config, spec)
        return replace(resolved, kv=replace(resolved.kv, dtype=torch.float16))

    scores, pages = [], []
    for narrowed in (False, True):
        if narrowed:
            monkeypatch.setattr("weft.engine.ranks.loading.resolve", narrow)
        harness = Harness(tiny_model("yi"), page_size=8, num_pages=32, dtype="float32", max_num_batched_tokens=16)
        harness.poison_pages()
        handle = harness.add(range(3, 60), max_tokens=4, prompt_logprobs=0, ignore_eos=True, **GREEDY)
        harness.run()
        scores.append(torch.tensor([float(entry.values[0]) for entry in harness.prompt_logprobs[handle]]))
        pages.append(harness.engine.resolved.kv.page_bytes)
    assert pages[0] == 2 * pages[1]
    assert not torch.equal(*scores)
    assert torch.allclose(*scores, atol=0.05)
