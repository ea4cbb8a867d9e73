"""What the GPU did in a few iterations: time per kind of kernel and idle time, from a torch profiler (Chrome) trace."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("router", "logits_kernel", "choose_kernel"), "router"),
    (("grouped",), "experts"),
    (("scatter_kernel", "combine_kernel", "switch_kernel"), "rows of experts"),
    (("gate_up",), "gate-up"),
    (("qkv",), "qkv"),
    (("residual",), "o or down"),
    (("product", "push_kernel", "mid_kernel", "few_kernel"), "product"),
    (("_reduce_kernel", "_reduce_pushed_kernel", "_meet_kernel"), "sums of ranks"),
    (("matmul",), "lm head"),
    (("flash", "pod_kernel", "together_kernel"), "attention"),
    (("decode",), "decode attention"),
    (("prefill",), "prefill attention"),
    (("sample", "penalize", "remember", "softmax", "sort", "topk"), "sampling"),
    (
        ("embed", "norm", "sumsq", "prepare", "elementwise", "fill", "index", "gather", "scatter", "reduce", "cat"),
        "element-wise",
    ),
)
"""Parts of a kernel's name and its kind; the first match wins. No other code depends on names of kernels."""
PRODUCTS = ("qkv", "o", "gate-up", "down")
"""The GEMMs of a layer, in order."""
FIRST_KERNEL = "prepare"
"""Part of the name of the kernel that begins an iteration."""


class Event(NamedTuple):
    """A kernel, copy or memset on the GPU. Times are in microseconds."""

    name: str
    begin: float
    end: float
    stream: int
    is_kernel: bool


def read_events(file: Path) -> list[Event]:
    """The GPU's events of a Chrome trace, sorted by begin. Raises `ValueError` if the file is no such trace."""
    try:
        rows = json.loads(file.read_text())["traceEvents"]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is not a Chrome trace") from None
    kinds = {"kernel": True, "gpu_memcpy": False, "gpu_memset": False}
    events = [
        Event(r["name"], float(r["ts"]), float(r["ts"]) + float(r["dur"]), r["args"].get("stream", 0), kinds[r["cat"]])
        for r in rows
        if r.get("ph") == "X" and r.get("cat") in kinds
    ]
    return sorted(events, key=lambda e: (e.begin, e.end))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals into disjoint ones, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _covered(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Total length of disjoint intervals inside `[begin, end)`."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals)


def _named_kind(event: Event) -> str:
    if not event.is_kernel:
        return "copies"
    name = event.name.lower()
    return next((kind for parts, kind in KINDS if any(p in name for p in parts)), "other")


def _by_duration(events: list[Event], kinds: list[str], which: list[int]) -> None:
    """Tell o and down apart by duration: down's matrix is three to four times the size of o's."""
    lengths = {i: events[i].end - events[i].begin for i in which}
    ordered = sorted(lengths.values())
    short, long = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    for i, length in lengths.items():
        kinds[i] = "down" if length**2 > short * long else "o"


def kinds_of(events: list[Event]) -> list[str]:
    """The kind of each event, in order.

    One kernel serves several GEMMs. In the serial plan the order identifies them: qkv, o, gate-up, down. Two launches
    for experts stand for gate-up and down; a shared expert's launch may follow each. A trace with another order has
    overlapped nano-batches: there, duration separates o from down, and a GEMM with an uninformative name stays
    "product".
    """
    kinds = [_named_kind(e) for e in events]
    products = {e.stream for e, kind in zip(events, kinds, strict=True) if kind in ("qkv", "product")}
    attention = {e.stream for e, kind in zip(events, kinds, strict=True) if kind.endswith("attention")}
    serial = attention <= products
    last: dict[int, str] = {}
    halfway: set[int] = set()  # streams whose last GEMM was the first one of experts
    residual: list[int] = []
    for i, (event, kind) in enumerate(zip(events, kinds, strict=True)):
        if FIRST_KERNEL in event.name.lower():
            last.clear()
        before = last.get(event.stream)
        expected = PRODUCTS[(PRODUCTS.index(before) + 1) % len(PRODUCTS)] if before in PRODUCTS else PRODUCTS[0]
        if kind == "o or down":
            residual.append(i)
            serial = serial and (before is None or expected in ("o", "down"))
            kinds[i] = "down" if expected == "down" else "o"
        elif kind == "product" and attention <= products:
            kinds[i] = expected
        elif kind in PRODUCTS:
            serial = serial and (before is None or kind == expected)
        if kind == "experts" and event.stream in halfway:
            last[event.stream] = "down"
        if kind == "experts":
            halfway ^= {event.stream}
        if kinds[i] in (*PRODUCTS, "lm head"):
            last[event.stream] = kinds[i]
            halfway.discard(event.stream)
    if residual and not serial:
        _by_duration(events, kinds, residual)
    return kinds


class TraceFigures(NamedTuple):
    """Figures over complete iterations, without the start and end of the profiler."""

    iterations: int
    ms_per_iteration: dict[str, float]
    """Milliseconds by kind, largest first. Streams count separately: the sum exceeds `milliseconds` if they overlap."""
    milliseconds: float
    """Mean milliseconds of an iteration."""
    idle_share: float
    """Share of the time in which no kernel runs on any stream."""
    idle_between_us: tuple[float, float]
    """Time from an iteration's last kernel to the next one's first: median and largest."""
    idle_inside_us: float
    """Mean idle time of an iteration between its first and last kernel."""


def _starts(events: list[Event]) -> list[float]:
    """The time at which each iteration begins."""
    return [e.begin for e in events if e.is_kernel and FIRST_KERNEL in e.name.lower()]


def summarize(events: list[Event]) -> TraceFigures | None:
    """Returns None unless the trace has a complete iteration and the beginning of the next."""
    starts = _starts(events)
    if len(starts) < 2:
        return None
    events = [e for e in events if e.begin >= starts[0]]
    kernels = [e for e in events if e.is_kernel]
    begin, end, count = starts[0], starts[-1], len(starts) - 1
    busy = union((e.begin, e.end) for e in kernels)
    between = [
        max(0.0, start - max((e.end for e in kernels if e.begin < start), default=start)) for start in starts[1:]
    ]
    times: dict[str, float] = defaultdict(float)
    stream_end: dict[int, float] = {}
    for event, kind in zip(events, kinds_of(events), strict=True):
        # A dependent launch starts early and waits for the previous kernel: that time belongs to the previous one.
        first = max(event.begin, stream_end.get(event.stream, event.begin))
        stream_end[event.stream] = max(event.end, first)
        times[kind] += max(0.0, min(event.end, end) - max(first, begin))
    idle = end - begin - _covered(busy, begin, end)
    return TraceFigures(
        iterations=count,
        ms_per_iteration={k: t / 1e3 / count for k, t in sorted(times.items(), key=lambda item: -item[1]) if t > 0},
        milliseconds=(end - begin) / 1e3 / count,
        idle_share=idle / (end - begin),
        idle_between_us=(statistics.median(between), max(between)),
        idle_inside_us=max(0.0, idle - sum(between)) / count,
    )


BEGIN = 0.4
"""Share of a run's tokens that are computed before recording starts."""


class Recorder:
    """Records a few iterations of a run after `BEGIN` of its tokens are computed.

    iterations: 0 records nothing. One more is recorded first, because the profiler is still starting then. `seconds` is
    the time that starting and stopping the profiler took.
    """

    def __init__(self, iterations: int, tokens: int, *, file: Path | None = None) -> None:
        self._iterations, self._file = iterations, file
        self._tokens_left = BEGIN * tokens
        self._profile: Any = None
        self._stop_at = 0
        self._done = iterations == 0
        self.seconds = 0.0
        if iterations:  # the first profile of a process loads the profiler's library
            first = self._new()
            first.start()
            first.stop()

    def _new(self) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        if self._file is not None or not activities:
            activities.append(ProfilerActivity.CPU)
        return profile(activities=activities)

    def step(self, iteration: int, tokens: int) -> None:
        """Called after iteration number `iteration`, of `tokens` tokens, was committed."""
        self._tokens_left -= tokens
        if self._done or self._tokens_left > 0:
            return
        if self._profile is None:
            begin = time.perf_counter()
            self._profile = self._new()
            self._profile.start()
            self._stop_at = iteration + self._iterations + 2
            self.seconds += time.perf_counter() - begin
        elif iteration >= self._stop_at:
            self.stop()

    def stop(self) -> None:
        """End recording. The run calls this at its end."""
        if self._profile is not None and not self._done:
            begin = time.perf_counter()
            self._profile.stop()
            self.seconds += time.perf_counter() - begin
        self._done = True

    def figures(self) -> TraceFigures | None:
        """Write the trace file, if requested. Returns None if no complete iteration on a GPU was recorded."""
        self.stop()
        if self._profile is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = self._file or Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            events = read_events(file)
        starts = _starts(events)
        return summarize([e for e in events if len(starts) < 3 or e.begin >= starts[1]])
