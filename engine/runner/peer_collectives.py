"""`PeerCollectives`: collectives of GPUs that reach each other's memory, as kernels of this rank's stream.

Each exchange of a graph has flags of its own, and each graph counts its replays, so all ranks must replay the same
graphs in the same order. What is launched outside of graphs has flags and a count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.collectives import Graph
from weft.kernels import collectives as kernels
from weft.kernels.collectives import Peers
from weft.kernels.gpu import gpu

ALIGNED = 256
FEW = 32
"""tokens up to which one step is taken for the quicker one where nothing was measured"""
MEASURED = 16
"""sums whose time is taken"""
SAMPLED_WORDS = 8
"""of a row that a captured exchange of samplers takes, at most"""
LOOSE_WORDS = 1 << 16
"""of each rank, in an exchange outside of graphs; what is longer takes several"""


class Memory(Protocol):
    """See `ranks.arena.Arena`."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def addresses(self) -> Tensor: ...


class Sizes:
    """What a rank's memory is divided into, before `take`: bytes, the same on all ranks."""

    def __init__(self, spec: ModelSpec, max_tokens: int, max_seqs: int, dtype: torch.dtype) -> None:
        ranks = spec.shard_of.ranks
        self.sums = max(2 * spec.num_layers + 1, MEASURED)
        """of a model's graph, the embedding's included"""
        self.room = max_seqs * SAMPLED_WORDS
        """words of a rank's inbox"""
        self.of_sums = self.sums * 2 * ranks * 4
        self.of_samples = kernels.gather_programs(self.room) * ranks * 4
        self.of_loose = kernels.gather_programs(LOOSE_WORDS) * ranks * 4
        hidden = spec.hidden_size
        activations = 4 * max_tokens * hidden * dtype.itemsize + max_tokens * max(ranks, -(-hidden // 64)) * 4
        own = self.of_sums + self.of_samples + self.of_loose + 4 * ranks * (self.room + 2 * LOOSE_WORDS)
        self.total = activations + own + 32 * ALIGNED


class PeerCollectives:
    """See `DeviceCollectives`. For one stream: what is launched runs one behind the other."""

    def __init__(self, memory: Memory, rank: int, ranks: int, sizes: Sizes) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory, self._taken, self._sizes = memory.memory, 0, sizes
        device = self._memory.device
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)
        """see `Peers`"""
        self._peers = Peers(memory.addresses, rank, ranks, self.abort)
        self._sums = self._place(self.take((sizes.of_sums,), torch.uint8))
        self._samples = self._place(self.take((sizes.of_samples,), torch.uint8))
        self._sample_inbox = self._place(self.take((ranks, sizes.room), torch.int32))
        self._loose = self._place(self.take((sizes.of_loose,), torch.uint8))
        self._loose_inboxes = [self._place(self.take((ranks, LOOSE_WORDS), torch.int32)) for _ in range(2)]
        self._numbers = {graph: torch.zeros(1, dtype=torch.int32, device=device) for graph in Graph}
        self._loose_number = torch.zeros(1, dtype=torch.int32, device=device)
        self._graph: Graph | None = None
        self._shots: list[tuple[int, int]] = []
        self._next = 0
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
        self._graph, self._next = graph, 0
        try:
            yield
        finally:
            self._graph = None

    def use(self, shots: dict[int, int]) -> None:
        """What was measured: steps by tokens."""
        self._shots = sorted(shots.items())

    def shots(self, tokens: int) -> int:
        """In how many steps a sum of so many tokens is made."""
        for size, shots in reversed(self._shots):
            if size <= tokens:
                return shots
        # Two ranks write as much in two steps as they read in one.
        return 1 if self._shots or self.ranks == 2 or tokens <= FEW else 2

    def microseconds(self, tokens: int, shots: int, hidden: int, dtype: torch.dtype) -> float:
        """Of such a sum, measured: every rank does so at once. Its memory is free again afterwards."""
        taken = self._taken
        partials = [self.take((tokens, hidden), dtype) for _ in range(2)]
        x, sumsq = self.take((tokens, hidden), dtype), self.take((self.ranks, tokens), torch.float32)
        live = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        here = gpu()
        assert here is not None
        for launches in (2, MEASURED):
            begin.record()
            with self.inside(Graph.MODEL):
                for i in range(launches):
                    self._sum(partials[i % 2], x, sumsq, live, add=True, num_sms=here.sms, shots=shots)
            end.record()
        end.synchronize()
        for tensor in (*partials, x, sumsq):
            tensor.zero_()
        torch.cuda.synchronize()  # others will run on other streams
        self._taken = taken
        return 1e3 * begin.elapsed_time(end) / MEASURED

    def reduce(self, partial: Tensor, x: Tensor, sumsq: Tensor, *, live: Tensor, add: bool, num_sms: int) -> Tensor:
        self._sum(partial, x, sumsq, live, add=add, num_sms=num_sms, shots=self.shots(len(x)))
        return sumsq[: self.ranks]

    def _sum(
        self, partial: Tensor, x: Tensor, sumsq: Tensor, live: Tensor, *, add: bool, num_sms: int, shots: int
    ) -> None:
        assert self._graph is Graph.MODEL
        assert self._next < self._sizes.sums
        flags, self._next = self._sums + self._next * 2 * self.ranks * 4, self._next + 1
        tokens, hidden = x.shape
        kernels.reduce(
            self._peers, self._numbers[Graph.MODEL], flags, partial=self._place(partial), x=self._place(x),
            sumsq=self._place(sumsq), stride_sumsq=sumsq.stride(0), live=live, tokens=tokens, hidden=hidden,
            dtype=x.dtype, add=add, shots=shots, num_sms=num_sms,
        )  # fmt: skip

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


class Imagined:
    """Memory of the meta device: what would be launched with it can be compiled."""

    def __init__(self, size: int, ranks: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device="meta")
        self.addresses = torch.empty(ranks, dtype=torch.int64, device="meta")
