"""`HybridCalls`: all ways to run attention of hybrid batches of a model, captured once and replayed for all batches.

Grids are fixed, and counts, lists and lengths are in device memory, so a batch costs one small transfer: no launch is
planned, compiled or captured for it. All batches use the same random pages. Other packages (`foreign_attention`) plan
on the host and are captured for each batch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.prefill_attention import prefill_attention, prefill_workspace
from weft.kernels.attention.work_lists import (
    FIRST_DECODERS,
    ITEM_FIELDS,
    SPLIT_FIELDS,
    TILE_FIELDS,
    decode_items,
    one_launch,
    prefill_items,
    prefill_splits,
    with_decodes,
)
from weft.kernels.tuning.measure import Meter, Sustained, capture
from weft.tools.kernels import foreign_attention
from weft.tools.kernels.hybrid_batches import HEAD_DIM, HEADS, KV_HEADS, SPLITS, Hybrid, best_splits, share_of_decodes

DTYPE = torch.bfloat16
PAGE, LAYERS, PAGES = 64, 4, 1 << 14
"""Shape of the pool. A batch that needs more pages uses some of them twice, far apart."""
DECODE_SLOTS = 1024
PREFILL_SLOTS = 512
"""Partial slots over the heads, as in an engine."""
MIN_BURST_US = 1500.0
"""Minimum duration of a timed burst. It sets the number of replays."""
PAUSE = 0.6
"""Pause after a burst as a fraction of it, so that the card stays below its power limit."""
LEAST_PAUSE_S = 0.001
NEAR = 3e-3
"""Largest difference by norm from sums in another order; the most in 37 batches was 1.4e-3."""


SETTINGS = ("rule", "all", "few", "half", "share", "tiles", "together")
"""Settings of one launch. How many programs begin with decodes: by the engine's rule, all, few, or the paper's 50:50
and proportional policies. `AS_TILES`: decodes are one-query tiles in the chunk's kernel; `TOGETHER`: every program does
both at the same time."""
AS_TILES, TOGETHER = 0, -1


class Section(NamedTuple):
    """A work list's position in the transferred words."""

    begin: int
    rows: int
    fields: int


class Foreign(NamedTuple):
    """A call of another package, captured for one batch."""

    graph: tuple[Any, int]
    call: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """Keeps the lengths and tables that the graph reads alive. Reused memory once left chunks without keys, which ran
    ten times as fast and computed nothing."""
    attended: tuple[torch.Tensor, torch.Tensor]
    """Outputs of the last layer: decodes, the chunk."""


class HybridCalls:
    """Ways to run attention, by name; `load` a batch, then time them. Lists are planned as an engine plans them.

    device: "meta" for `compile_ways`. largest: decodes, tokens of a chunk, and tokens of a context with its chunk.
    """

    def __init__(
        self, model: str, device: str = "cuda", *, sms: int | None = None, pages: int = PAGES,
        largest: tuple[int, int, int] = (256, 16384, 24576),
    ) -> None:  # fmt: skip
        self.model, self.device, self.kv_heads = model, device, KV_HEADS[model]
        self.sms = sms or int(torch.cuda.get_device_properties(0).multi_processor_count)
        self._slots = PREFILL_SLOTS // self.kv_heads
        rows, chunk, tokens = largest
        per_row = -(-tokens // PAGE)
        group = HEADS // self.kv_heads
        self.pool = torch.randn(pages, LAYERS, 2, PAGE, self.kv_heads, HEAD_DIM, device=device, dtype=DTYPE)
        ids = torch.randperm(pages - 1, device=device) + 1
        self.table = ids[torch.arange((rows + 1) * per_row, device=device) % len(ids)].to(torch.int32)
        self.table = self.table.view(rows + 1, per_row)
        self.q = torch.randn(rows + chunk, HEADS, HEAD_DIM, device=device, dtype=DTYPE)
        self.out = torch.zeros(rows + chunk, HEADS * HEAD_DIM, device=device, dtype=DTYPE)
        tiles = -(-chunk * group // 128) + 2
        sizes = {
            "decode": (rows + DECODE_SLOTS, ITEM_FIELDS),
            "whole": (tiles, TILE_FIELDS),
            "cut": (tiles + self._slots, SPLIT_FIELDS),
            "streams": (tiles + self._slots, SPLIT_FIELDS),
            "batched": (tiles + rows + self._slots, SPLIT_FIELDS),
        }
        # A pointer that is not aligned to 16 bytes would be another kernel to Triton.
        self._counts = {name: 4 * i for i, name in enumerate((*sizes, "decoders"))}
        self._sections, at = dict[str, Section](), 4 * len(self._counts)
        for name, (count, fields) in sizes.items():
            at = -(-at // 32) * 32
            self._sections[name] = Section(at, count, fields)
            at += count * fields
        self._host = np.zeros(at, np.int32)
        self._there = torch.zeros(at, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(at, dtype=torch.int32)
        if device == "cuda":
            self._pinned = self._pinned.pin_memory()
        self._decoders = self._there[self._counts["decoders"] :][:1]
        self._space = decode_workspace(DECODE_SLOTS, rows + 1, self.kv_heads, group, HEAD_DIM, device)
        self._prefills = prefill_workspace(self._slots, self.kv_heads, HEAD_DIM, device)
        self.ways = self._make_ways()
        self.left_out: dict[str, str] = {}
        """Ways that cannot run here, with the reason."""
        self._graphs: dict[str, tuple[Any, int]] = {}
        self._foreign: dict[str, Foreign] = {}
        self._settings: dict[str, int] = {}
        self._batch: Hybrid | None = None

    def list_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the work items on the device, and their number."""
        begin, rows, fields = self._sections[name]
        at = self._counts[name]
        return self._there[begin : begin + rows * fields].view(rows, fields), self._there[at : at + 1]

    def _make_ways(self) -> dict[str, Callable[[int], None]]:
        from weft.kernels.attention.pod_hopper import PodWork, launch_pod
        from weft.kernels.attention.pod_together import launch_together

        q, pool, table, out = self.q, self.pool, self.table, self.out
        lists = {name: self.list_of(name) for name in self._sections}
        self._side = torch.cuda.Stream(priority=-1) if self.device == "cuda" else None

        def decode(layer: int, sms: int = self.sms) -> None:
            decode_attention(q, pool, layer, table, *lists["decode"], space=self._space, num_sms=sms, out=out)

        def prefill(layer: int, name: str = "cut", sms: int = self.sms) -> None:
            space = None if name == "whole" else self._prefills
            prefill_attention(q, pool, layer, table, *lists[name], space=space, num_sms=sms, out=out)

        def in_sequence(layer: int, name: str) -> None:
            decode(layer)
            prefill(layer, name)

        def streams(layer: int, sms: int) -> None:
            if self._side is None:
                decode(layer, sms)
                return prefill(layer, "streams", self.sms - sms)
            here = torch.cuda.current_stream()
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):
                decode(layer, sms)
            prefill(layer, "streams", self.sms - sms)
            return here.wait_stream(self._side)

        work = PodWork(*lists["decode"], *lists["cut"], self._decoders)

        def pod(layer: int, launch: Callable[..., Any] = launch_pod) -> None:
            launch(q, pool, layer, table, work, decodes=self._space, prefills=self._prefills, num_sms=self.sms, out=out)

        return {
            "whole": partial(in_sequence, name="whole"),
            "cut": partial(in_sequence, name="cut"),
            "pod": pod,
            "pod together": partial(pod, launch=launch_together),
            "decode": decode,
            "prefill": prefill,
            "batched": partial(prefill, name="batched"),
            **{f"streams {sms}": partial(streams, sms=sms) for sms in SPLITS},
        }

    def launch_all(self) -> None:
        """Launch every way once: `compile_ways` collects kernels from it."""
        for way in self.ways.values():
            way(0)

    def capture(self) -> None:
        """Record every way; a way that fails is left out. Kernels compile here unless `compile_ways` did it."""
        for name, way in self.ways.items():
            try:
                self._graphs[name] = capture([partial(way, layer) for layer in range(LAYERS)])
            except (RuntimeError, ValueError) as error:
                self.left_out[name] = str(error).splitlines()[0]

    def load(self, batch: Hybrid) -> dict[str, int]:
        """Plan the batch's lists and send them. Returns the plan: splits of a tile, programs by policy."""
        self._batch, self._foreign = batch, {}
        planned, lists = plan_lists(batch, self.sms, self._slots)
        words = self._host
        for name, items in lists.items():
            begin, rows, _ = self._sections[name]
            if len(items) > rows:
                raise ValueError(f"{batch.key} has {len(items)} items, more than the limit of {rows}")
            words[self._counts[name]] = len(items)
            words[begin : begin + items.size] = items.reshape(-1)
        words[self._counts["decoders"]] = planned["rule"]
        self._settings = {name: planned[name] for name in SETTINGS}
        if self.device == "cuda":
            torch.cuda.synchronize()  # the previous words are not read any more
        self._pinned.copy_(torch.from_numpy(words))
        self._there.copy_(self._pinned, non_blocking=True)
        return planned

    def names(self, every: bool) -> list[str]:
        """Return the ways to time for the loaded batch. every: all, not only our serial kernels and POD by the rule."""
        batch = self._batch
        assert batch is not None
        settings = {number: name for name, number in reversed(self._settings.items())}  # the first name of a number
        pods = [f"pod {name}" for name in self._settings if name in settings.values()]
        if not (batch.chunk and batch.decodes):
            pods = []
        core = ["whole", "cut", *(name for name in pods if name in ("pod rule", "pod together"))] if pods else []
        if not every:
            return core
        ours = ["decode", "prefill", "batched"] if pods else ["decode" if batch.decodes else "prefill", "batched"]
        streams = [f"streams {sms}" for sms in best_splits(batch)] if pods else []
        names = [*dict.fromkeys([*core, *pods]), *ours, *streams, *(foreign_attention.NAMES if pods else ())]
        return [name for name in names if name.split(" ")[0] not in self.left_out and name not in self.left_out]

    def prepare(self, name: str) -> bool:
        """Prepare a way that is captured per batch. Returns False if it cannot run; `left_out` has the reason."""
        if name not in foreign_attention.NAMES or name in self._foreign:
            return True
        assert self._batch is not None
        try:
            call = foreign_attention.call(name, self._batch, self.q, self.pool, self.table)
            attended: list[tuple[torch.Tensor, torch.Tensor]] = []

            def attend(layer: int) -> None:
                attended.append(call(layer))

            captured = capture([partial(attend, layer) for layer in range(LAYERS)])
            self._foreign[name] = Foreign(captured, call, attended[-1])
        except (foreign_attention.Unavailable, ImportError, RuntimeError, TypeError, ValueError) as error:
            self.left_out[name] = str(error).splitlines()[0] or type(error).__name__
            return False
        return True

    def _graph(self, name: str) -> tuple[Any, int]:
        if name.startswith("pod "):
            programs = self._settings[name[4:]]
            self._decoders.fill_(programs)
            return self._graphs[{AS_TILES: "batched", TOGETHER: "pod together"}.get(programs, "pod")]
        return self._foreign[name].graph if name in foreign_attention.NAMES else self._graphs[name]

    def attended(self, name: str) -> torch.Tensor:
        """Return the `[T, Hq * D]` output of the last layer if a way of `foreign_attention` ran last."""
        decodes, chunk = self._foreign[name].attended
        return torch.cat((decodes.flatten(0, 1).flatten(1), chunk.flatten(0, -3).flatten(1)))

    def burst(self, name: str, expected_us: float) -> float:
        """Return microseconds of a call, after a pause. expected_us: an estimate of its time."""
        graph, count = self._graph(name)
        replays = max(1, min(32, int(MIN_BURST_US / (expected_us * count)) + 1))
        time.sleep(max(LEAST_PAUSE_S, PAUSE * expected_us * count * replays * 1e-6))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / (count * replays) * 1e3

    def sustained(self, name: str, meter: Meter, seconds: float, expected_us: float) -> Sustained:
        """Measure time, watts and clock over the last two thirds of `seconds` without a pause."""
        graph, count = self._graph(name)
        replays = max(1, int(10_000 / (expected_us * count)))
        begun = time.monotonic()
        _hold(graph, replays, begun + seconds / 3)
        since = time.monotonic()
        done = _hold(graph, replays, begun + seconds)
        ms = (time.monotonic() - since) * 1e3 / (done * count)
        mhz, watts = meter.mean(since)
        return Sustained(ms, watts, mhz)

    def same_bits(self) -> bool:
        """Return whether one launch by the rule matches its two halves bit for bit and writes every row.

        If decodes are tiles, it is compared with the kernel for tiles. If both run at the same time they add in another
        order: then whether the launch repeats its bits, and they are close to those of the halves.
        """
        assert self._batch is not None
        rows, rule = self._batch.decodes + self._batch.chunk, self._settings["rule"]
        self._graphs["batched" if rule == AS_TILES else "cut"][0].replay()
        want = self.out[:rows].clone()
        if rule == TOGETHER:
            near = want.float()
            self._graph("pod rule")[0].replay()
            want = self.out[:rows].clone()
            if not float((want.float() - near).norm()) < NEAR * float(near.norm()):
                return False
        self.out[:rows].fill_(float("nan"))
        self._graph("pod rule")[0].replay()
        return bool(torch.equal(self.out[:rows], want))


def _hold(graph: Any, replays: int, end: float) -> int:
    """Replay the graph until `end`, at least `replays` times; returns the count."""
    done = 0
    while not done or time.monotonic() < end:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        done += replays
    return done


def plan_lists(batch: Hybrid, sms: int, slots: int) -> tuple[dict[str, int], dict[str, NDArray[np.int32]]]:
    """Return a batch's plan and its work lists as the engine plans them.

    decode: all requests; whole, cut: the chunk's tiles; streams: cut for the SMs that two streams leave it; batched:
    decodes as one-query tiles, with the chunk's.
    """
    heads, d = batch.kv_heads, batch.decodes
    group = HEADS // heads
    options: dict[str, int] = {"num_kv_heads": heads, "max_slots": slots}
    decodes = decode_items(np.full(d, batch.length), num_kv_heads=heads, num_programs=4 * sms, max_slots=DECODE_SLOTS)
    chunk = [np.array([value][: min(batch.chunk, 1)]) for value in (d, batch.chunk, batch.context, d)]
    tiles = prefill_items(*chunk, group=group)
    parts = prefill_splits(tiles, num_programs=sms, **options)
    streams = prefill_splits(tiles, num_programs=sms - best_splits(batch)[0], **options)
    as_tiles = with_decodes(tiles, 0, np.full(d, batch.length), np.arange(d), group=group)
    batched = prefill_splits(as_tiles, num_programs=sms, **options)
    found = one_launch(decodes, tiles, lambda: as_tiles, num_kv_heads=heads, num_programs=sms, max_slots=slots)
    planned = {
        "parts": int((parts[:, 7] & 65535).max(initial=1)),
        "rule": TOGETHER if found.together else found.programs,
        "all": sms,
        "few": min(FIRST_DECODERS, sms),
        "half": sms // 2,
        "share": share_of_decodes(batch, sms),
        "tiles": AS_TILES,
        "together": TOGETHER,
    }
    return planned, {"decode": decodes, "whole": tiles, "cut": parts, "streams": streams, "batched": batched}


def compile_ways(models: Sequence[str], jobs: int) -> int:
    """Compile all ways in parallel into Triton's cache; returns the number of failures. Touches no GPU."""
    from weft.kernels.common.compilation import collect, compile_all
    from weft.kernels.common.gpu import KNOWN

    def work() -> None:
        for model in models:
            HybridCalls(model, "meta", sms=KNOWN["h200"].sms).launch_all()

    _, failed = compile_all(collect(work, KNOWN["h200"]), jobs)
    return len(failed)


def compile_in_subprocess(models: Sequence[str], jobs: int, timeout: float) -> None:
    """Run `compile_ways` in a separate process, since this one will hold a GPU; if it fails, launches compile."""
    code = f"from weft.tools.kernels.hybrid_calls import compile_ways; compile_ways({list(models)!r}, {jobs})"
    try:
        subprocess.run([sys.executable, "-c", code], timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        print("compilation takes too long; continuing", flush=True)
