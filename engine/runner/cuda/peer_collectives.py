"""`PeerCollectives`: collectives of GPUs that access each other's memory, as kernels on this rank's stream.

Each exchange of a graph has its own flags, and each graph counts its replays, so all ranks must replay the same graphs
in the same order. Eager launches have separate flags and a separate count.
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
ONE_STEP_TOKENS = 32  # Tokens up to which all-reduces use one step, if nothing was measured.
MEASURED = 16  # All-reduces per measurement.
REPLAYS = 3  # Replays of a measurement.
SAMPLED_WORDS = 8  # Maximum of words per row in a captured exchange of samplers.
EAGER_WORDS = 1 << 16  # Words per rank in an eager exchange. Longer data takes several exchanges.
MAX_PUSHED_TOKENS = 4096  # Maximum of tokens for GEMMs that push to other ranks.
MAX_PUSHED_TO_ALL = 256
"""Maximum of tokens for pushes to more than one other rank, since each takes the same bandwidth."""


class Memory(Protocol):
    """See `ranks.peer_memory.PeerMemory`."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def addresses(self) -> Tensor: ...

    @property
    def bases(self) -> tuple[int, ...]: ...


class PeerLayout:
    """Sizes of a rank's shared memory, in bytes unless noted, the same on all ranks."""

    def __init__(self, spec: ModelSpec, max_tokens: int, max_seqs: int, dtype: torch.dtype) -> None:
        ranks = spec.shard_of.ranks
        self.sums = max(2 * spec.num_layers * MAX_NANO_BATCHES + 1, MEASURED)
        """All-reduces of a model's graph, with the embedding's and separate ones for each nano-batch."""
        self.inbox_words = max_seqs * SAMPLED_WORDS  # Words of a rank's inbox for samplers.
        self.sum_flag_bytes = self.sums * 2 * ranks * 4
        self.sample_flag_bytes = kernels.gather_programs(self.inbox_words) * ranks * 4
        self.eager_flag_bytes = kernels.gather_programs(EAGER_WORDS) * ranks * 4
        hidden = spec.hidden_size
        self.pushed_tokens = min(max_tokens, MAX_PUSHED_TOKENS)
        self.tiles = max(-(-self.pushed_tokens // 64), 2) * -(-hidden // 64)
        """Flags of one rank's tiles in an all-reduce."""
        to_all = self.pushed_tokens if ranks == 2 else min(self.pushed_tokens, MAX_PUSHED_TO_ALL)
        self.rows = {1: to_all, 2: self.pushed_tokens}  # Rows that one rank sends, by steps of the all-reduce.
        sent = max(rows * width_of(hidden, ranks, steps) for steps, rows in self.rows.items())
        self.inbox = ranks * sent * dtype.itemsize  # Bytes of each of the two alternating inboxes.
        self.pushes = max(2 * spec.num_layers, MEASURED)  # GEMMs of a model's graph that push, in the serial plan.
        partial_tiles = 2 * MAX_NANO_BATCHES * -(-hidden // 64)  # the last tiles of nano-batches
        self.tile_flag_bytes = ranks * (self.tiles + partial_tiles) * 4
        """Bytes of flags per all-reduce after a push, over all nano-batches."""
        activations = 4 * max_tokens * hidden * dtype.itemsize + max_tokens * max(ranks, -(-hidden // 64)) * 4
        flags = self.sum_flag_bytes + self.sample_flag_bytes + self.eager_flag_bytes
        own = flags + 4 * ranks * (self.inbox_words + 2 * EAGER_WORDS)
        self.total = activations + own + 2 * self.inbox + self.pushes * self.tile_flag_bytes + 32 * ALIGNED


class PeerCollectives:
    """`DeviceCollectives` for launches in sequence on one stream."""

    def __init__(self, memory: Memory, rank: int, ranks: int, sizes: PeerLayout) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory, self._taken, self._sizes = memory.memory, 0, sizes
        device = self._memory.device
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)  # See `Peers`.
        self._peers = Peers(memory.addresses, rank, ranks, self.abort, memory.bases)
        self._sums = self._offset(self.allocate((sizes.sum_flag_bytes,), torch.uint8))
        self._samples = self._offset(self.allocate((sizes.sample_flag_bytes,), torch.uint8))
        self._sample_inbox = self._offset(self.allocate((ranks, sizes.inbox_words), torch.int32))
        self._eager = self._offset(self.allocate((sizes.eager_flag_bytes,), torch.uint8))
        self._eager_inboxes = [self._offset(self.allocate((ranks, EAGER_WORDS), torch.int32)) for _ in range(2)]
        self._numbers = {graph: torch.zeros(1, dtype=torch.int32, device=device) for graph in Graph}
        self._eager_number = torch.zeros(1, dtype=torch.int32, device=device)
        self._inboxes = [self._offset(self.allocate((sizes.inbox,), torch.uint8)) for _ in range(2)]
        self._tiles = self._offset(self.allocate((sizes.pushes * sizes.tile_flag_bytes,), torch.uint8))
        self._graph: Graph | None = None
        self._steps: list[tuple[int, Steps]] = []
        self._pushes_nano_batches = False
        self._next = 0
        self._flagged = 0  # Bytes of tile flags used so far in the current graph.
        self._pushed: dict[int | None, Pushed] = {}
        """Pushed GEMMs that wait for `reduce`, by the first of their tokens (None: in the serial plan)."""
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)  # Ticket counter of all-reduces after a push.
        self._turn = 0
        if device.type == "cuda":
            self._abort_stream = torch.cuda.Stream(device)
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()

    def abort_waits(self) -> None:
        """End all launched waits, with undefined results, because another rank has ended. Call from any thread."""
        with torch.cuda.stream(self._abort_stream):
            self.abort.copy_(self._one, non_blocking=True)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        begin, self._taken = self._taken, self._taken + -(-size // ALIGNED) * ALIGNED
        assert self._taken <= len(self._memory), "the peer memory is too small"
        return self._memory[begin : begin + size].view(dtype).view(shape)

    def _offset(self, tensor: Tensor) -> int:
        """Return a tensor's offset in the peer memory, in bytes."""
        return int(tensor.storage_offset()) * tensor.element_size()

    @contextmanager
    def inside(self, graph: Graph) -> Iterator[None]:
        kernels.advance(self._numbers[graph])
        self._graph, self._next, self._flagged, self._pushed = graph, 0, 0, {}
        try:
            yield
        finally:
            self._graph = None

    def use(self, steps: dict[int, Steps], *, push_nano_batches: bool = False) -> None:
        """Use measured steps by number of tokens. push_nano_batches: GEMMs of nano-batches push too. Engines do not use
        this, because `weft bench ranks` found it slower on four H200s."""
        self._steps, self._pushes_nano_batches = sorted(steps.items()), push_nano_batches

    def steps(self, tokens: int) -> Steps:
        """Return the steps of an all-reduce of this many tokens."""
        for size, steps in reversed(self._steps):
            if size <= tokens:
                return steps
        # Two ranks write as much in two steps as they read in one.
        return Steps(1 if self._steps or self.ranks == 2 or tokens <= ONE_STEP_TOKENS else 2)

    def microseconds(
        self, tokens: int, steps: Steps, hidden: int, dtype: torch.dtype, products: Sequence[Tensor] = ()
    ) -> float:
        """Measure an all-reduce of this many tokens on all ranks at once, and free its memory. products: weights
        `[hidden, K]` of GEMMs to alternate in front of it.
        """
        taken, used = self._taken, self._steps
        partials = [self.allocate((tokens, hidden), dtype) for _ in range(2)]
        x, sumsq = self.allocate((tokens, hidden), dtype), self.allocate((self.ranks, tokens), torch.float32)
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
        torch.cuda.synchronize()  # later launches use other streams
        self._taken, self._steps = taken, used
        return 1e3 * found

    def push(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, *, turn: int, begin: int | None = None,
        among: int | None = None, num_sms: int, space: Workspace | None, num_tokens: Tensor | None,
        config: GemmConfig | None = None,
    ) -> bool:  # fmt: skip
        if self._graph is not Graph.MODEL:
            return False  # timed on its own: no all-reduce follows
        tokens, hidden, first, sizes = len(a), len(weight), begin or 0, self._sizes
        steps = self.steps(tokens if among is None else among).pushed
        if not steps or first + tokens > sizes.rows[steps] or (begin is not None and not self._pushes_nano_batches):
            return False
        room = sizes.tiles if begin is None else max(-(-tokens // 64), 2) * -(-hidden // 64)
        taken = self.ranks * room * 4
        assert self._flagged + taken <= sizes.pushes * sizes.tile_flag_bytes
        # Two inboxes suffice for each token, as explained in `sum_buffers`.
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
        """Return the offset of the next all-reduce's flags, `[2, ranks]`."""
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
                self._peers, number, pushed, meet=flags + 4 * self.ranks, x=self._offset(x), sumsq=self._offset(sumsq),
                stride_sumsq=sumsq.stride(0), live=live, ticket=self._ticket, tokens=tokens, hidden=hidden,
                dtype=x.dtype, add=add, overlap=begin is None, num_sms=num_sms,
            )  # fmt: skip
        else:
            kernels.reduce(
                self._peers, number, flags, partial=self._offset(partial), x=self._offset(x), sumsq=self._offset(sumsq),
                stride_sumsq=sumsq.stride(0), live=live, tokens=tokens, hidden=hidden, dtype=x.dtype, add=add,
                shots=self.steps(tokens).sums, num_sms=num_sms,
            )  # fmt: skip
        return sumsq[: self.ranks]

    def all_gather(self, mine: Tensor) -> Tensor:
        words = mine.contiguous().view(-1).view(torch.int32)
        out = torch.empty(self.ranks, len(words), dtype=torch.int32, device=words.device)
        if self._graph is Graph.SAMPLE:
            assert self._next == 0
            assert len(words) <= self._sizes.inbox_words
            self._next = 1
            kernels.all_gather(
                self._peers, self._numbers[Graph.SAMPLE], self._samples, inbox=self._sample_inbox,
                room=self._sizes.inbox_words, mine=words, out=out,
            )  # fmt: skip
        else:
            assert self._graph is None
            for begin in range(0, len(words), EAGER_WORDS):
                self._gather_eager(words[begin : begin + EAGER_WORDS], out, begin)
        return out.view(mine.dtype).view(self.ranks, *mine.shape)

    def _gather_eager(self, words: Tensor, out: Tensor, begin: int) -> None:
        whole = len(words) == out.shape[1]
        into = out if whole else torch.empty(self.ranks, len(words), dtype=torch.int32, device=out.device)
        kernels.advance(self._eager_number)
        kernels.all_gather(
            self._peers, self._eager_number, self._eager, inbox=self._eager_inboxes[self._turn], room=EAGER_WORDS,
            mine=words, out=into,
        )  # fmt: skip
        self._turn = 1 - self._turn
        if not whole:
            out[:, begin : begin + len(words)] = into


def _milliseconds(launch: Callable[[], None], device: torch.device) -> float:
    """Time launches in a graph, as iterations run them, without host overhead. All ranks at once."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launch()  # loads the kernels, which a capture cannot do
            stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
        with torch.cuda.stream(stream):
            return _replay_milliseconds(graph.replay)
    return _replay_milliseconds(launch)


def _replay_milliseconds(play: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    play()  # synchronizes the ranks
    begin.record()
    for _ in range(REPLAYS):
        play()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


class MetaMemory:
    """Peer memory on the meta device, for compiling kernels."""

    def __init__(self, size: int, ranks: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device="meta")
        self.addresses = torch.empty(ranks, dtype=torch.int64, device="meta")
        self.bases = (0,) * ranks
