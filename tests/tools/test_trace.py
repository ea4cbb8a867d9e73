"""Reading GPU activity from a Chrome trace, checked on hand-made traces: kinds of kernels, idle time, overlap."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.tools.bench.trace import Event, Recorder, kinds_of, read_events, summarize, union

LAYER = ("_qkv_kernel", "_decode_kernel", "prefill_kernel", "_residual_kernel", "_gate_up_kernel", "_residual_kernel")
KINDS = ["qkv", "decode attention", "prefill attention", "o", "gate-up", "down"]


def kernels(*rows: tuple[str, float, float] | tuple[str, float, float, int]) -> list[Event]:
    """(name, begin, duration[, stream])"""
    return [Event(r[0], r[1], r[1] + r[2], r[3] if len(r) > 3 else 7, True) for r in rows]


def iteration(start: float, layer: tuple[str, ...] = LAYER, layers: int = 2) -> tuple[list[Event], float]:
    """One iteration of the serial plan without gaps: each kernel takes 10 us except down, 30; and the iteration's
    end."""
    events, at = [], start
    names = ["_prepare_kernel", "_embed_kernel", *layer * layers, "_final_norm_kernel", "_matmul_kernel"]
    residuals = 0
    for name in [*names, "_sample_kernel", "_remember_kernel"]:
        is_last = name == layer[-1] and (name != layer[3] or residuals % 2)
        residuals += name == layer[3]
        length = 30.0 if is_last else 10.0
        events += kernels((name, at, length))
        at += length
    return events, at


def as_chrome(events: list[Event]) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "kernel" if e.is_kernel else "gpu_memcpy", "name": e.name, "ts": e.begin,
         "dur": e.end - e.begin, "pid": 0, "tid": e.stream, "args": {"device": 0, "stream": e.stream}}
        for e in events
    ]  # fmt: skip


@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        ("product_kernel", "decode_kernel", "_prefill_kernel", "product_kernel", "product_kernel", "product_kernel"),
        ("_qkv_kernel", "decode_kernel", "_prefill_kernel", "product_kernel", "_gate_up_kernel", "product_kernel"),
        ("product_qkv", "DecodeKernel", "prefill<64>", "product_residual", "product_gate_up", "product_residual"),
    ],
)
def test_the_order_of_a_layer_identifies_gemms_of_one_kernel(layer: tuple[str, ...]) -> None:
    events, _ = iteration(0.0, layer)
    assert (
        kinds_of(events) == ["element-wise", "element-wise", *KINDS * 2, "element-wise", "lm head"] + ["sampling"] * 2
    )


@pytest.mark.parametrize("shared", [False, True])
def test_experts_count_as_gate_up_and_down(shared: bool) -> None:
    """GEMMs of one kernel around them keep their names, including those of a shared expert."""
    routed = ("_logits_kernel", "_choose_kernel", "_scatter_kernel", "grouped_kernel")
    product = ("product_kernel",) if shared else ()
    layer = (
        "product_kernel", "decode_kernel", "_prefill_kernel", "product_kernel", *routed, *product, "grouped_kernel",
        "_combine_kernel", *product,
    )  # fmt: skip
    kinds = ["qkv", *KINDS[1:4], "router", "router", "rows of experts", "experts", *["gate-up"] * shared, "experts"]
    kinds += ["rows of experts", *["down"] * shared]
    events = kernels(*((name, 10.0 * i, 10.0) for i, name in enumerate(("_prepare_kernel", *layer * 2))))
    assert kinds_of(events)[1:] == kinds * 2


def test_gemms_that_send_are_gemms_and_their_sums_are_separate() -> None:
    layer = (
        "product_kernel", "_decode_kernel", "prefill_kernel", "push_kernel", "_reduce_pushed_kernel", "_meet_kernel",
        "mid_kernel", "push_kernel", "_reduce_pushed_kernel", "_meet_kernel",
    )  # fmt: skip
    sums = ["sums of ranks"] * 2
    events = kernels(*((name, 10.0 * i, 10.0) for i, name in enumerate(("_prepare_kernel", *layer * 2))))
    assert kinds_of(events)[1:] == [*KINDS[:4], *sums, "gate-up", "down", *sums] * 2


def test_a_trace_that_starts_inside_a_layer_is_read_from_the_next_iteration() -> None:
    first, end = iteration(0.0)
    second, end = iteration(end)
    third, _ = iteration(end)
    whole = summarize([*second, *third])
    assert whole is not None
    for lost in (4, 5, 7, 9):
        assert summarize(first[lost:] + second + third) == whole


def test_times_of_the_serial_plan_add_up_to_the_iteration() -> None:
    first, end = iteration(100.0)
    copy = Event("Memcpy HtoD (Pinned -> Device)", end + 5, end + 8, 7, False)
    second, _ = iteration(end + 40)
    figures = summarize([*first, copy, *second])
    assert figures is not None
    assert figures.iterations == 1
    assert figures.ms_per_iteration == pytest.approx(
        {"down": 0.06, "element-wise": 0.03, "sampling": 0.02, "qkv": 0.02, "decode attention": 0.02,
         "prefill attention": 0.02, "o": 0.02, "gate-up": 0.02, "lm head": 0.01, "copies": 0.003}
    )  # fmt: skip
    assert figures.milliseconds == pytest.approx((end - 100 + 40) / 1e3)
    assert figures.idle_between_us == pytest.approx((40, 40))
    assert figures.idle_share == pytest.approx(40 / (end - 100 + 40))
    assert figures.idle_inside_us == pytest.approx(0, abs=1e-6)


def test_gaps_between_iterations_are_distinguished_from_gaps_inside() -> None:
    events, at = [], 0.0
    for gap in (20.0, 70.0, 30.0, 0.0):
        one, end = iteration(at)
        late = [e._replace(begin=e.begin + 6, end=e.end + 6) if e.begin >= at + 20 else e for e in one]
        events += late
        at = end + 6 + gap
    figures = summarize(events)
    assert figures is not None
    assert figures.iterations == 3
    assert figures.idle_between_us == pytest.approx((30, 70))
    assert figures.idle_inside_us == pytest.approx(6)


def test_overlapping_streams_are_busy_once_and_count_for_each_kind() -> None:
    events = kernels(
        ("_prepare_kernel", 0, 10),
        ("_qkv_kernel", 10, 40),
        ("_decode_kernel", 20, 60, 9),  # 20 .. 80, overlapping qkv until 50
        ("_gate_up_kernel", 60, 10),  # inside decode
        ("_prepare_kernel", 100, 10),
    )
    figures = summarize(sorted(events, key=lambda e: e.begin))
    assert figures is not None
    assert figures.idle_share == pytest.approx(0.2)
    assert figures.idle_between_us == pytest.approx((20, 20))
    assert figures.ms_per_iteration == pytest.approx(
        {"decode attention": 0.06, "qkv": 0.04, "gate-up": 0.01, "element-wise": 0.01}
    )


def test_a_dependent_launch_that_waits_is_not_counted_twice() -> None:
    events = kernels(
        ("_prepare_kernel", 0, 10), ("_qkv_kernel", 10, 50), ("_decode_kernel", 15, 85), ("_prepare_kernel", 100, 9)
    )
    figures = summarize(events)
    assert figures is not None
    assert figures.ms_per_iteration == pytest.approx({"qkv": 0.05, "decode attention": 0.04, "element-wise": 0.01})
    assert figures.idle_share == 0


def test_duration_distinguishes_o_from_down_if_nano_batches_interleave() -> None:
    rows = [
        ("_qkv_kernel", 20.0), ("_qkv_kernel", 22.0), ("_residual_kernel", 14.0), ("_gate_up_kernel", 80.0),
        ("_residual_kernel", 15.0), ("_residual_kernel", 44.0), ("_gate_up_kernel", 82.0), ("_residual_kernel", 45.0),
    ]  # fmt: skip
    events, at = [], 0.0
    for name, length in rows * 3:
        events += kernels((name, at, length))
        at += length
    want = ["qkv", "qkv", "o", "gate-up", "o", "down", "gate-up", "down"]
    assert kinds_of(events) == want * 3


def test_a_gemm_without_a_name_is_not_guessed_if_streams_overlap() -> None:
    events = kernels(("product_kernel", 0, 9), ("_decode_kernel", 0, 9, 3), ("product_kernel", 9, 9))
    assert kinds_of(events) == ["product", "decode attention", "product"]


def test_kernels_of_other_libraries_have_kinds_too() -> None:
    names = {
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>": "attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>": "element-wise",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT": "other",
        "_penalize_kernel": "sampling",
    }
    assert kinds_of(kernels(*((n, i, 1) for i, n in enumerate(names)))) == list(names.values())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_a_union_covers_the_same_points_once(spans: list[tuple[int, int]]) -> None:
    intervals = [(float(a), float(a + n)) for a, n in spans]
    merged = union(intervals)
    for point in range(53):
        half = point + 0.5
        inside = any(a <= half < b for a, b in intervals)
        assert sum(a <= half < b for a, b in merged) == inside
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_a_chrome_trace_gives_its_gpu_events_in_order(tmp_path: Path) -> None:
    first, end = iteration(10.5)
    copy = Event("Memcpy DtoH (Device -> Pinned)", end, end + 2.25, 12, False)
    noise = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "pid": 1, "tid": 1, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 5, "pid": 1, "tid": 1},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 3, "pid": 0, "tid": 7, "id": 4},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*noise, *reversed(as_chrome([*first, copy]))]}))
    assert read_events(file) == [*first, copy]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3'])
def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a Chrome trace"):
        read_events(file)


def test_less_than_an_iteration_has_no_figures() -> None:
    assert summarize([]) is None
    assert summarize(iteration(0.0)[0]) is None


def test_a_recorder_waits_for_its_share_of_the_tokens_and_writes_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    recorder = Recorder(2, 1000, file=file)
    for i in range(1, 4):
        recorder.step(i, 100)
    assert recorder.figures() is None
    assert not file.exists()
    recorder = Recorder(2, 1000, file=file)
    for i in range(1, 12):
        recorder.step(i, 100)
    assert recorder.figures() is None  # nothing ran on a GPU
    assert "traceEvents" in json.loads(file.read_text())


def test_a_recorder_of_no_iterations_records_nothing(tmp_path: Path) -> None:
    recorder = Recorder(0, 10, file=tmp_path / "trace.json")
    for i in range(1, 9):
        recorder.step(i, 10)
    assert recorder.figures() is None
    assert not list(tmp_path.iterdir())
