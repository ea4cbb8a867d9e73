"""The attention path of an iteration, as the engine counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.plans.pipeline import UNREAD_FROM, Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.cuda.cuda_inputs import RING, DeviceInputs
from weft.engine.runner.iteration.attention_lists import AttentionGrid
from weft.engine.runner.iteration.attention_path import PARTS, PATHS, AttentionPath, PathCounts, describe_paths
from weft.engine.runner.iteration.batch import Batch, SamplingInputs
from weft.engine.runner.iteration.input_layout import Layout
from weft.engine.runner.options.resolve import resolve
from weft.kernels.attention.break_evens import BreakEven, BreakEvens, TableKey, read
from weft.kernels.common.gpu import KNOWN, compiling_for
from weft.server.observe.engine_metrics import ATTENTION, ATTENTION_PARTS


def test_metrics_have_a_label_for_each() -> None:
    assert (ATTENTION, ATTENTION_PARTS) == (PATHS, PARTS)
    assert set(AttentionPath._fields) == {"path", *PARTS}


@pytest.mark.parametrize(
    ("decodes", "chunks", "how", "path"),
    [
        (3, 0, {}, "decodes"),
        (0, 2, {}, "chunks"),
        (3, 2, {}, "serial"),
        (3, 2, {"fused": True}, "pod"),
        (3, 2, {"fused": True, "in_turn": True}, "pod_in_turn"),
        (3, 2, {"fused": True, "in_turn": True, "together": True}, "pod_together"),
        (3, 0, {"fused": True}, "decodes"),
        (0, 2, {"fused": True, "in_turn": True}, "chunks"),
        (3, 2, {"lanes": 2}, "pipeline"),
        (3, 0, {"lanes": 2}, "pipeline"),
    ],
)
def test_paths(decodes: int, chunks: int, how: dict[str, Any], path: str) -> None:
    assert AttentionPath.of(decodes, chunks, **how) == AttentionPath(path)


def test_paths_and_pieces_are_counted() -> None:
    counts = PathCounts()
    for path in (AttentionPath("pod", True, True), AttentionPath("pod"), AttentionPath("decodes", True)):
        counts.add(path)
    assert counts.iterations == {"pod": 2, "decodes": 1, "split_decodes": 2, "cut_chunks": 1}


TOGETHER = AttentionPath("pod_together", split_decodes=True, cut_chunks=True)
NEAR, ELSEWHERE = (32, 2000, 1, 2000), (4096, 20000, 64, 20000)


@pytest.mark.parametrize(
    ("slots", "pod", "row", "path"),
    [
        (0, "off", None, AttentionPath("serial", split_decodes=True)),
        (64, "off", None, AttentionPath("serial", split_decodes=True, cut_chunks=True)),
        (64, "on", None, TOGETHER),
        (64, "auto", None, TOGETHER),
        (64, "auto", BreakEven(*NEAR, "half", 66), AttentionPath("pod", split_decodes=True, cut_chunks=True)),
        (64, "auto", BreakEven(*NEAR, "all", 132), AttentionPath("pod_in_turn", split_decodes=True, cut_chunks=True)),
        (64, "auto", BreakEven(*NEAR, "whole", 132), AttentionPath("pod_in_turn", split_decodes=True)),
        (64, "auto", BreakEven(*NEAR, "tiles", 0), AttentionPath("pod_tiles", split_decodes=True, cut_chunks=True)),
        (64, "auto", BreakEven(*ELSEWHERE, "half", 66), TOGETHER),
        (64, "auto", BreakEven(*NEAR, "together", 132), TOGETHER),
        (64, "on", BreakEven(*NEAR, "tiles", 0), TOGETHER),
        (64, "on", BreakEven(*NEAR, "whole", 132), TOGETHER),
        (64, "off", BreakEven(*NEAR, "whole", 132), AttentionPath("serial", split_decodes=True, cut_chunks=True)),
        (0, "auto", BreakEven(*NEAR, "half", 66), AttentionPath("serial", split_decodes=True)),
    ],
)
def test_the_slab_of_a_gpu_records_the_path(
    slots: int, pod: Any, row: BreakEven | None, path: AttentionPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode after 2,000 tokens and 32 tokens of a prompt after 2,000: too little for a hundred programs unless
    split."""
    spec, zeros = read_spec(MODEL_PATH), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **{**options, "pin_memory": False}))
    layout = Layout.of(64, 8, spec.heads_per_kv, prefill_slots=slots, pod=pod)
    inputs = DeviceInputs(layout, torch.device("cpu"), 8, 200)
    inputs.break_evens = None if row is None else BreakEvens([row])
    query, none = np.array([1, 32], np.int32), np.zeros(0, np.int32)
    hybrid = Batch(
        step=1, num_decodes=1, slots=np.arange(2, dtype=np.int32), epochs=np.zeros(2, np.int32), query_len=query,
        kv_len=np.array([2000, 2032], np.int32), token_ids=np.ones(33, np.int32),
        positions=np.concatenate(([1999], np.arange(2000, 2032))).astype(np.int32), slot_mapping=np.zeros(33, np.int64),
        page_table=np.ones((2, 130), np.int32), sampled_rows=none, sampling=SamplingInputs.none(), count_resets=(),
        prompt_logprobs=(),
    )  # fmt: skip
    serial = Pipeline(serial_period(spec, 64, 132), spec)
    inputs.send(hybrid, serial, AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, 4, page_size=16))
    assert inputs.attention == path
    if row is not None and path.path == "pod" and pod == "auto":
        assert int(inputs.decoders(0)) == row.programs
    tiles = inputs.prefill_work(0)[0][: int(inputs.prefill_work(0)[1])]
    as_tiles = path.path == "pod_tiles"
    assert (int(inputs.decode_work(0)[None].number) == 0) == as_tiles
    assert {tuple(tile[:4]) for tile in tiles.tolist() if tile[1] == 1} == ({(0, 1, 1999, 0)} if as_tiles else set())


@pytest.mark.parametrize("model", ["llama-3-8b", "yi-6b"])
def test_an_engine_reads_the_break_evens_of_the_bench(model: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from weft.tools.kernels import bench_attention

    us = dict.fromkeys(("whole", "cut", "pod all", "pod few", "pod half"), 100.0)
    row = {"model": model, "chunk": 512, "context": 8192, "decodes": 32, "length": 8192, "regime": "burst", "us": us}
    config = EngineConfig(model_preset=model, load_format="dummy", pod="auto", cache_dir=str(tmp_path))
    spec, _ = choose_spec(config)
    with compiling_for(KNOWN["h200"]):
        assert bench_attention._keep(tmp_path, [row], print)
        resolved = resolve(config, spec)
        table, message = read(resolved.cache_dir, TableKey.here(*resolved.attention_shape(spec)[:4]))
    assert table is not None, message
    assert table.rows == (BreakEven(512, 8192, 32, 8192, "all", 132),)


@pytest.mark.parametrize(("slots", "pod"), [(0, "off"), (64, "off"), (64, "auto")])
def test_decodes_alone_see_nothing_of_earlier_chunks(slots: int, pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four slabs of the ring held chunks, some of whose pages were read in 16 bits."""
    spec, zeros = read_spec(MODEL_PATH), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **{**options, "pin_memory": False}))
    layout = Layout.of(64, 8, spec.heads_per_kv, unpacked=(200, 16), prefill_slots=slots, pod=pod)
    inputs = DeviceInputs(layout, torch.device("cpu"), 8, 200)
    i, none = np.arange(33, dtype=np.int32), np.zeros(0, np.int32)
    hybrid = Batch(
        step=1, num_decodes=1, slots=i[:2], epochs=i[:2], query_len=np.array([1, 32], np.int32),
        kv_len=np.array([2000, 2032], np.int32), token_ids=i, positions=i, slot_mapping=i.astype(np.int64),
        page_table=np.ones((2, 130), np.int32), sampled_rows=none, sampling=SamplingInputs.none(), count_resets=(),
        prompt_logprobs=(),
    )  # fmt: skip
    rows = ("slots", "epochs", "query_len", "kv_len", "token_ids", "positions", "slot_mapping", "page_table")
    alone = hybrid._replace(**{name: getattr(hybrid, name)[:1] for name in rows})
    counts = {"attention": inputs.prefill_work(0)[1], "in 16 bits": inputs.column["unpacked"]}
    found = []
    for batch in (*[hybrid] * RING, alone):
        pipeline = Pipeline(serial_period(spec, 64, 132), spec)
        inputs.send(batch, pipeline, AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, 4, page_size=16))
        found.append({name: bool(count.any()) for name, count in counts.items()})
    assert found[RING - 1]["in 16 bits"]
    assert found[RING] == dict.fromkeys(counts, False)
    assert inputs.decode_work(0)[None].number.item() > 0
    if pod == "auto":
        assert int(inputs.decoders(0)) == 132, "all programs begin with decodes"


@pytest.mark.parametrize("slots", [0, 64])
def test_items_of_the_last_layer_are_some_of_the_others(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 32 whose last token alone is sampled, split along its keys or not."""
    spec, zeros = read_spec(MODEL_PATH), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **{**options, "pin_memory": False}))
    inputs = DeviceInputs(
        Layout.of(UNREAD_FROM, 8, spec.heads_per_kv, prefill_slots=slots), torch.device("cpu"), 8, 200
    )
    i, none = np.arange(33, dtype=np.int32), np.zeros(0, np.int32)
    hybrid = Batch(
        step=1, num_decodes=1, slots=i[:2], epochs=i[:2], query_len=np.array([1, 32], np.int32),
        kv_len=np.array([2000, 2032], np.int32), token_ids=i, positions=i, slot_mapping=i.astype(np.int64),
        page_table=np.ones((2, 130), np.int32), sampled_rows=i[32:], sampling=SamplingInputs.none()._replace(
            logit_tokens=i[32:]), count_resets=none, prompt_logprobs=(),
    )  # fmt: skip
    pipeline = Pipeline(serial_period(spec, UNREAD_FROM, 132), spec)
    assert pipeline.after_drop
    inputs.send(hybrid, pipeline, AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, 4, page_size=16))
    (items, count), (left, few) = inputs.prefill_work(0), inputs.kept_prefill_work(0)
    assert items.shape == left.shape
    tiles, kept = items[: int(count)].tolist(), left[: int(few)].tolist()
    assert kept
    assert kept == [tile for tile in tiles if tile[0] <= 32 < tile[0] + tile[1]]
    assert bool(slots) == (len({tuple(tile[:4]) for tile in kept}) < len(kept)), "cut along its keys, or not"


def test_the_log_lists_the_possible_paths() -> None:
    assert describe_paths("torch", cuts=False, pod="off").endswith("torch, decodes and chunks in sequence")
    assert "in sequence, tiles" in describe_paths("triton", cuts=True, pod="off")
    assert "in one launch (--pod auto), tiles" in describe_paths("triton", cuts=True, pod="auto")
    assert describe_paths("triton", cuts=False, pod="off").endswith("in sequence")


def test_an_engine_counts_every_iteration_once() -> None:
    harness = Harness(MODEL_PATH, page_size=16, num_pages=100)
    harness.add(list(range(5, 15)), max_tokens=20, ignore_eos=True, **GREEDY)
    for _ in range(4):
        harness.step()
    harness.add(list(range(5, 35)), max_tokens=3, ignore_eos=True, **GREEDY)
    harness.run()
    stats = harness.engine.stats()
    paths = stats.scheduler.attention
    assert paths["chunks"] == 1
    assert paths["serial"] == 1
    assert sum(paths.values()) == stats.iterations
