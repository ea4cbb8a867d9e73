"""`PeerCollectives`: collectives of GPUs that reach each other's memory, as kernels of this rank's stream.

Each exchange of a graph has flags of its own, and each graph counts its replays, so all ranks must replay the same
graphs in the same order. What is launched outside of graphs has flags and a count too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import MAX_NANO_BATCHES
from weft.engine.runner.device.collectives import Graph, Steps
from weft.kernels.collectives import peer as kernels
from weft.kernels.collectives.peer import Peers
from weft.kernels.collectives.push_gemm import Inbox, Pushed, push_project, reduce_pushed, width_of
from weft.kernels.common.gpu import gpu
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Workspace, workspace
from weft.kernels.matmul.projections import linear_project

ALIGNED = 256
FEW = 32
"""tokens up to which one step is taken for the quicker one where nothing was measured"""
MEASURED = 16
"""sums whose time is taken"""
REPLAYS = 3
"""of them"""
SAMPLED_WORDS = 8
"""of a row that a captured exchange of samplers takes, at most"""
LOOSE_WORDS = 1 << 16
"""of each rank, in an exchange outside of graphs; what is longer takes several"""
MOST_PUSHED = 4096
"""tokens up to which products write to other ranks at all"""
PUSHED_TO_ALL = 256
"""tokens up to which they write to more than one other rank: a link would have to take as much of each"""


class Memory(Protocol):
    """See `ranks.peer_memory.PeerMemory`."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def addresses(self) -> Tensor: ...

    @property
    def bases(self) -> tuple[int, ...]: ...


class Sizes:
    """What a rank's memory is divided into, before `take`: bytes, the same on all ranks."""

    def __init__(self, spec: ModelSpec, max_tokens: int, max_seqs: int, dtype: torch.dtype) -> None:
        ranks = spec.shard_of.ranks
        self.sums = max(2 * spec.num_layers * MAX_NANO_BATCHES + 1, MEASURED)
        """of a model's graph, the embedding's included: each nano-batch has its own"""
        self.room = max_seqs * SAMPLED_WORDS
        """words of a rank's inbox"""
        self.of_sums = self.sums * 2 * ranks * 4
        self.of_samples = kernels.gather_programs(self.room) * ranks * 4
        self.of_loose = kernels.gather_programs(LOOSE_WORDS) * ranks * 4
        hidden = spec.hidden_size
        self.pushed_tokens = min(max_tokens, MOST_PUSHED)
        self.tiles = max(-(-self.pushed_tokens // 64), 2) * -(-hidden // 64)
        """flags of what one rank sends in a sum"""
        to_all = self.pushed_tokens if ranks == 2 else min(self.pushed_tokens, PUSHED_TO_ALL)
        self.rows = {1: to_all, 2: self.pushed_tokens}
        """of what one rank sends, by steps of the sum"""
        sent = max(rows * width_of(hidden, ranks, steps) for steps, rows in self.rows.items())
        self.inbox = ranks * sent * dtype.itemsize
        """bytes of a place that takes turns"""
        self.pushes = max(2 * spec.num_layers, MEASURED)
        """products of a model's graph that write to the ranks: of the serial plan"""
        cut = 2 * MAX_NANO_BATCHES * -(-hidden // 64)
        """flags that nano-batches have more of, whose last tiles are not full"""
        self.of_tiles = ranks * (self.tiles + cut) * 4
        """bytes of flags of a sum behind one, of all tokens or in nano-batches"""
        activations = 4 * max_tokens * hidden * dtype.itemsize + max_tokens * max(ranks, -(-hidden // 64)) * 4
        own = self.of_sums + self.of_samples + self.of_loose + 4 * ranks * (self.room + 2 * LOOSE_WORDS)
        self.total = activations + own + 2 * self.inbox + self.pushes * self.of_tiles + 32 * ALIGNED


class PeerCollectives:
    """See `DeviceCollectives`. For one stream: what is launched runs one behind the other."""

    def __init__(self, memory: Memory, rank: int, ranks: int, sizes: Sizes) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory, self._taken, self._sizes = memory.memory, 0, sizes
        device = self._memory.device
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)
        """see `Peers`"""
        self._peers = Peers(memory.addresses, rank, ranks, self.abort, memory.bases)
        self._sums = self._place(self.take((sizes.of_sums,), torch.uint8))
        self._samples = self._place(self.take((sizes.of_samples,), torch.uint8))
        self._sample_inbox = self._place(self.take((ranks, sizes.room), torch.int32))
        self._loose = self._place(self.take((sizes.of_loose,), torch.uint8))
        self._loose_inboxes = [self._place(self.take((ranks, LOOSE_WORDS), torch.int32)) for _ in range(2)]
        self._numbers = {graph: torch.zeros(1, dtype=torch.int32, device=device) for graph in Graph}
        self._loose_number = torch.zeros(1, dtype=torch.int32, device=device)
        self._inboxes = [self._place(self.take((sizes.inbox,), torch.uint8)) for _ in range(2)]
        self._tiles = self._place(self.take((sizes.pushes * sizes.of_tiles,), torch.uint8))
        self._graph: Graph | None = None
        self._steps: list[tuple[int, Steps]] = []
        self._sends_apart = False
        self._next = 0
        self._flagged = 0
        """bytes of flags of tiles that the products of a graph have taken"""
        self._pushed: dict[int | None, Pushed] = {}
        """products whose sums are to follow, by the first of their tokens (None: the serial plan's)"""
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        """of such a sum"""
        self._turn = 0
        if device.type == "cuda":
            self._beside = torch.cuda.Stream(device)
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()

    def end_waiting(self) -> None:
        """From any thread: what has been launched comes to its end, with whatever is there. Another rank has ended."""
        with torch.cuda.stream(self._beside):
            self.abort.copy_(self._one, non_blocking=True)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        begin, self._taken = self._taken, self._taken + -(-size // ALIGNED) * ALIGNED
        assert self._taken <= len(self._memory), "the arena was made too small"
        return self._memory[begin : begin + size].view(dtype).view(shape)

    def _place(self, tensor: Tensor) -> int:
        """Where it begins in the arena, in bytes."""
        return int(tensor.storage_offset()) * tensor.element_size()

    @contextmanager
    def inside(self, graph: Graph) -> Iterator[None]:
        kernels.advance(self._numbers[graph])
        self._graph, self._next, self._flagged, self._pushed = graph, 0, 0, {}
        try:
            yield
        finally:
            self._graph = None

    def use(self, steps: dict[int, Steps], *, apart: bool = False) -> None:
        """What was measured: steps by tokens. apart: products of nano-batches send as well. No start asks for that:
        on four H200s `weft bench ranks` found it slower.
        """
        self._steps, self._sends_apart = sorted(steps.items()), apart

    def steps(self, tokens: int) -> Steps:
        """How sums of so many tokens are made."""
        for size, steps in reversed(self._steps):
            if size <= tokens:
                return steps
        # Two ranks write as much in two steps as they read in one.
        return Steps(1 if self._steps or self.ranks == 2 or tokens <= FEW else 2)

    def microseconds(
        self, tokens: int, steps: Steps, hidden: int, dtype: torch.dtype, products: Sequence[Tensor] = ()
    ) -> float:
        """Of a sum of so many tokens and, where there are any, one of the products `[hidden, K]` before it, which take
        turns; measured: every rank does so at once. Its memory is free again afterwards.
        """
        taken, used = self._taken, self._steps
        partials = [self.take((tokens, hidden), dtype) for _ in range(2)]
        x, sumsq = self.take((tokens, hidden), dtype), self.take((self.ranks, tokens), torch.float32)
        device = x.device
        live = torch.full((1,), tokens, dtype=torch.int32, device=device)
        inputs = [torch.zeros(tokens, weight.shape[1], dtype=dtype, device=device).normal_() for weight in products]
        here = gpu()
        assert here is not None
        common: dict[str, Any] = {
            "num_sms": here.sms,
            "num_tokens": live,
            "space": workspace(device) if products else None,
        }

        def launch(i: int) -> None:
            if products:
                a, weight = inputs[i % len(products)], products[i % len(products)]
                if not self.push(a, weight, None, turn=i % 2, **common):
                    linear_project(a, None, weight, 0.0, out=partials[i % 2], **common)
            self.reduce(partials[i % 2], x, sumsq, live=live, add=True, num_sms=here.sms)

        def launch_all() -> None:
            with self.inside(Graph.MODEL):
                for i in range(MEASURED):
                    launch(i)

        self.use({0: steps})
        found = _milliseconds(launch_all, device) / MEASURED
        for tensor in (*partials, x, sumsq):
            tensor.zero_()
        torch.cuda.synchronize()  # others will run on other streams
        self._taken, self._steps = taken, used
        return 1e3 * found

    def push(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, *, turn: int, begin: int | None = None,
        among: int | None = None, num_sms: int, space: Workspace | None, num_tokens: Tensor | None,
        config: GemmConfig | None = None,
    ) -> bool:  # fmt: skip
        if self._graph is not Graph.MODEL:
            return False  # timed alone: no sum follows
        tokens, hidden, first, sizes = len(a), len(weight), begin or 0, self._sizes
        steps = self.steps(tokens if among is None else among).pushed
        if not steps or first + tokens > sizes.rows[steps] or (begin is not None and not self._sends_apart):
            return False
        room = sizes.tiles if begin is None else max(-(-tokens // 64), 2) * -(-hidden // 64)
        taken = self.ranks * room * 4
        assert self._flagged + taken <= sizes.pushes * sizes.of_tiles
        # Of each token by itself two places are enough, for the reason that `SumPlace` has.
        row = width_of(hidden, self.ranks, steps) * a.element_size()
        inbox = Inbox(self._inboxes[turn] + first * row, sizes.rows[steps], self._tiles + self._flagged, room)
        found = push_project(
            self._peers, self._numbers[Graph.MODEL], inbox, a, weight, bias, steps=steps, num_sms=num_sms, space=space,
            num_tokens=num_tokens, config=config,
        )  # fmt: skip
        if found is None:
            return False
        self._flagged += taken
        self._pushed[begin] = found
        return True

    def _flags(self) -> int:
        """`[2, ranks]` of the next sum."""
        assert self._next < self._sizes.sums
        return self._sums + self._next * 2 * self.ranks * 4

    def reduce(
        self, partial: Tensor, x: Tensor, sumsq: Tensor, *, live: Tensor, add: bool, num_sms: int,
        begin: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert self._graph is Graph.MODEL
        flags, pushed = self._flags(), self._pushed.pop(begin, None)
        self._next += 1
        tokens, hidden = x.shape
        number = self._numbers[Graph.MODEL]
        if pushed is not None:
            reduce_pushed(
                self._peers, number, pushed, meet=flags + 4 * self.ranks, x=self._place(x), sumsq=self._place(sumsq),
                stride_sumsq=sumsq.stride(0), live=live, ticket=self._ticket, tokens=tokens, hidden=hidden,
                dtype=x.dtype, add=add, beside=begin is None, num_sms=num_sms,
            )  # fmt: skip
        else:
            kernels.reduce(
                self._peers, number, flags, partial=self._place(partial), x=self._place(x), sumsq=self._place(sumsq),
                stride_sumsq=sumsq.stride(0), live=live, tokens=tokens, hidden=hidden, dtype=x.dtype, add=add,
                shots=self.steps(tokens).sums, num_sms=num_sms,
            )  # fmt: skip
        return sumsq[: self.ranks]

    def all_gather(self, mine: Tensor) -> Tensor:
        words = mine.contiguous().view(-1).view(torch.int32)
        out = torch.empty(self.ranks, len(words), dtype=torch.int32, device=words.device)
        if self._graph is Graph.SAMPLE:
            assert self._next == 0
            assert len(words) <= self._sizes.room
            self._next = 1
            kernels.all_gather(
                self._peers, self._numbers[Graph.SAMPLE], self._samples, inbox=self._sample_inbox,
                room=self._sizes.room, mine=words, out=out,
            )  # fmt: skip
        else:
            assert self._graph is None
            for begin in range(0, len(words), LOOSE_WORDS):
                self._gather_loose(words[begin : begin + LOOSE_WORDS], out, begin)
        return out.view(mine.dtype).view(self.ranks, *mine.shape)

    def _gather_loose(self, words: Tensor, out: Tensor, begin: int) -> None:
        whole = len(words) == out.shape[1]
        into = out if whole else torch.empty(self.ranks, len(words), dtype=torch.int32, device=out.device)
        kernels.advance(self._loose_number)
        kernels.all_gather(
            self._peers, self._loose_number, self._loose, inbox=self._loose_inboxes[self._turn], room=LOOSE_WORDS,
            mine=words, out=into,
        )  # fmt: skip
        self._turn = 1 - self._turn
        if not whole:
            out[:, begin : begin + len(words)] = into


def _milliseconds(launch: Callable[[], None], device: torch.device) -> float:
    """Of launches as an iteration makes them: in a graph, where they take the host no time. All ranks at once."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launch()  # what is captured must have been loaded
            stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
        with torch.cuda.stream(stream):
            return _played(graph.replay)
    return _played(launch)


def _played(play: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    play()  # from here on the ranks are in step
    begin.record()
    for _ in range(REPLAYS):
        play()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


class Imagined:
    """Memory of the meta device: what would be launched with it can be compiled."""

    def __init__(self, size: int, ranks: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device="meta")
        self.addresses = torch.empty(ranks, dtype=torch.int64, device="meta")
        self.bases = (0,) * ranks
