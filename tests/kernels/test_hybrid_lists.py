"""The lists of a hybrid batch, executed over pages of NaN, compute its attention: either may be empty, for any
split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import LAYER, assert_attention, empty_out, iteration
from played import Played, Scores

pytest.importorskip("triton")
from weft.kernels.attention.work_lists import (
    decode_items,
    first_decoders,
    one_launch,
    prefill_items,
    prefill_splits,
    with_decodes,
)
from weft.tools.kernels import foreign_attention, hybrid_calls
from weft.tools.kernels.hybrid_batches import HEAD_DIM, HEADS, Hybrid

SLOTS = 64


BATCHES = {
    "decodes": st.lists(st.integers(1, 700), max_size=3),
    "chunks": st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=2),
    "group": st.integers(1, 16),
    "d": st.sampled_from([8, 16, 24]),
    "page": st.sampled_from([16, 32, 64, 128]),
    "part": st.sampled_from([None, 0, 128, 256]),
    "window": st.sampled_from([None, None, 1, 100, 300]),
    "bent": st.booleans(),
    "programs": st.sampled_from([2, 12, 132]),
    "seed": st.integers(0, 99),
}


def check(
    decodes: list[int], chunks: list[tuple[int, int]], group: int, d: int, page: int, part: int | None,
    window: int | None, bent: bool, programs: int, seed: int,
) -> None:  # fmt: skip
    if not decodes and not chunks:
        decodes = [1]
    kv_heads, count = 1 + (group < 5), len(decodes)
    it = iteration(decodes, chunks, group * kv_heads, kv_heads, d, page, seed=seed)
    how = Scores(0.3, window, 4.0, torch.linspace(-1, 2, group * kv_heads)) if bent else Scores(window=window)
    out = empty_out(it)
    played = Played(out, group * kv_heads, SLOTS, np.random.default_rng(seed), how)
    table = torch.from_numpy(it.requests.page_table)
    items = decode_items(
        np.array(decodes, int), num_kv_heads=kv_heads, num_programs=programs, max_slots=SLOTS, window=window,
        page_size=page, split_tokens=part or 0,
    )  # fmt: skip
    first = count + np.cumsum([n for _, n in chunks]) - [n for _, n in chunks]
    tiles = prefill_items(
        first.astype(int), np.array([n for _, n in chunks], int), np.array([c for c, _ in chunks], int),
        count + np.arange(len(chunks)), group=group,
    )  # fmt: skip
    whole = tiles
    if window is None:  # with one, tiles stay whole
        tiles = prefill_splits(tiles, num_kv_heads=kv_heads, num_programs=programs, max_slots=SLOTS, split_keys=part)
        assert 0 <= first_decoders(items, tiles, num_kv_heads=kv_heads, num_programs=programs) <= programs
    played.decodes(it.q, it.kv, LAYER, table, items)
    played.tiles(it.q, it.kv, LAYER, table, tiles)
    assert_attention(out, it, 1e-5, window=window, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
    if window is not None:
        return
    lengths = np.array(decodes, int)
    for variant in (None, "tiles", "whole", "together"):
        found = one_launch(
            items, whole, lambda: with_decodes(whole, 0, lengths, np.arange(count), group=group), variant=variant,
            num_kv_heads=kv_heads, num_programs=programs, max_slots=SLOTS,
        )  # fmt: skip
        if variant == "tiles" and decodes and chunks:
            assert not len(found.decodes)
            assert found.programs == 0
        assert found.together == bool(variant == "together" and decodes and chunks) or variant is None
        out = empty_out(it)
        played = Played(out, group * kv_heads, SLOTS, np.random.default_rng(seed), how)
        played.decodes(it.q, it.kv, LAYER, table, found.decodes)
        played.tiles(it.q, it.kv, LAYER, table, found.parts)
        assert_attention(out, it, 1e-5, scale=how.scale, softcap=how.softcap, sinks=how.sinks)


@settings(max_examples=12, deadline=None)
@given(**BATCHES)
def test_the_lists_of_a_hybrid_batch_are_its_attention(**batch: Any) -> None:
    check(**batch)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@given(**BATCHES)
def test_the_lists_of_many_hybrid_batches_are_their_attention(**batch: Any) -> None:
    check(**batch)


class Graph:
    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


class Event:
    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 2.0


SMALL = Hybrid("llama-3-8b", 8, 300, 2, 280)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> hybrid_calls.HybridCalls:
    """The calls of a device that executes its lists."""
    rng = np.random.default_rng(0)

    def play(kind: str, q: Any, kv: Any, layer: int, table: Any, items: Any, count: Any, *, out: Any, **_: Any) -> None:
        work = items[: int(count)].numpy()
        for row, queries in {(int(w[0]), int(w[1]) if kind == "tiles" else 1) for w in work}:
            out[row : row + queries] = float("nan")  # before the list: a row is written once
        getattr(Played(out, HEADS, 1024, rng), kind)(q, kv, layer, table, work)

    def pod(q: Any, kv: Any, layer: int, table: Any, work: Any, *, out: Any, **_: Any) -> None:
        play("decodes", q, kv, layer, table, work.decode_items, work.num_decodes, out=out)
        play("tiles", q, kv, layer, table, work.prefill_items, work.num_prefills, out=out)

    def capture(work: list[Callable[[], object]]) -> tuple[Graph, int]:
        for call in work[-1:]:
            call()
        return Graph(work[-1:]), len(work)

    monkeypatch.setattr(hybrid_calls, "decode_attention", partial(play, "decodes"))
    monkeypatch.setattr(hybrid_calls, "prefill_attention", partial(play, "tiles"))
    monkeypatch.setattr("weft.kernels.attention.pod_hopper.launch_pod", pod)
    monkeypatch.setattr("weft.kernels.attention.pod_together.launch_together", pod)
    monkeypatch.setattr(hybrid_calls, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = hybrid_calls.HybridCalls("llama-3-8b", "cpu", sms=12, pages=40, largest=(4, 16, 512))
    made.capture()
    return made


def test_every_variant_of_a_batch_is_its_attention(
    calls: hybrid_calls.HybridCalls, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    seen: list[tuple[Any, ...]] = []
    flash = ModuleType("flash_attn")

    def attend(q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any, causal: bool) -> Any:
        assert causal
        assert k.shape == v.shape == (10, 256, 8, HEAD_DIM)
        assert (block_table.shape[1] - 1) * 256 < int(cache_seqlens[0]) <= block_table.shape[1] * 256
        assert int(block_table.max()) < len(k)
        seen.append((*q.shape, len(cache_seqlens), len(block_table)))
        return q

    monkeypatch.setattr(flash, "flash_attn_with_kvcache", attend, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", flash)
    monkeypatch.setattr(foreign_attention.importlib.util, "find_spec", lambda _: True)
    plan = calls.load(SMALL)
    assert plan["parts"] >= 1
    names = calls.names(every=True)
    assert {"whole", "cut", "batched", "decode", "prefill", "pod rule", "pod share", "pod together"} < set(names)
    assert plan["tiles"] == 0 < plan["share"]
    assert sum(name.startswith("streams") for name in names) == 2
    rows, want = SMALL.decodes + SMALL.chunk, None
    for name in [n for n in names if calls.prepare(n) and n not in ("decode", "prefill")]:
        calls.out.fill_(float("nan"))
        assert calls.burst(name, 1000.0) > 0
        if name.startswith("flash"):
            continue
        got = calls.out[:rows].float()
        assert bool(calls.out[rows:].isnan().all())
        want = got if want is None else want
        assert float((got - want).norm() / want.norm()) < 1e-2, name
    assert calls.same_bits()
    assert set(seen) == {(2, 1, HEADS, HEAD_DIM, 2, 2), (1, 8, HEADS, HEAD_DIM, 1, 1)}
    assert "sdpa" in calls.left_out  # there is no such kernel here


def test_a_batch_that_is_too_large_is_named(calls: hybrid_calls.HybridCalls) -> None:
    with pytest.raises(ValueError, match="more than the limit"):
        calls.load(SMALL._replace(chunk=9000))


def test_variants_compile_for_hopper_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from weft.kernels.common import compilation

    found: list[Any] = []
    monkeypatch.setattr(compilation, "compile_all", lambda kernels, _: (found.extend(kernels), []))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert hybrid_calls.compile_ways(["yi-6b"], 1) == 0
    assert sorted({kernel.name for kernel in found}) == [
        "decode_kernel", "pod_kernel", "prefill_kernel", "together_kernel",
    ]  # fmt: skip
    assert len(found) == 5  # tiles whole, and cut


def test_a_package_that_cannot_be_loaded_is_skipped(
    calls: hybrid_calls.HybridCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: Any) -> None:
        raise ImportError("flash_attn_2_cuda.so: undefined symbol")

    monkeypatch.setattr(foreign_attention, "call", call)
    calls.load(Hybrid("llama-3-8b", 16, 64, 2, 64))
    assert not calls.prepare("flash-attn")
    assert "undefined symbol" in calls.left_out["flash-attn"]
