"""`CudaEagle3`: an EAGLE-3 head that drafts on a GPU.

A draft step is a graph per number of requests, which reads tokens, positions and states from device memory and advances
them. The host launches it once per draft, and learns the drafts with the results of the iteration that verifies them.
After an iteration with drafts, the next ones are made while the host commits it and forms the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.sample_buffers import SampleBuffers
from weft.engine.runner.device.eagle3 import Eagle3Layer
from weft.engine.runner.device.sampling import Sampling
from weft.engine.runner.iteration.batch import UNDRAFTED, Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.work_lists import ITEM_FIELDS


class _Graphs(NamedTuple):
    """For one number of requests. None if steps are launched eagerly."""

    begin: torch.cuda.CUDAGraph
    step: torch.cuda.CUDAGraph


def _sizes(most: int) -> list[int]:
    """Return the numbers of requests that have a graph."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


class CudaEagle3:
    """Launches on the current stream. Call `attach` before the first iteration."""

    def __init__(
        self, draft: Eagle3Head, weights: Eagle3Weights, target: Tensor, config: ResolvedConfig, inputs: DeviceInputs,
        sampling: Sampling, num_sms: int,
    ) -> None:  # fmt: skip
        """target `[V, H]`: the target's embeddings."""
        assert config.drafting is not None
        layer, device, slots = draft.layer, inputs.slab.device, config.max_num_seqs
        self.taps, self._config, self._inputs, self._num_sms = draft.taps, config, inputs, num_sms
        self._weights, self._layer = weights, Eagle3Layer(draft, weights, target, config)
        self._to_device = sampling.to_device
        self.tapped = torch.zeros(
            config.max_num_batched_tokens, len(draft.taps) * draft.tapped_size, dtype=config.compute_dtype,
            device=device,
        )  # fmt: skip
        """`[T, taps * H]` the target's stream at each of `taps`."""
        self._kv: Tensor | None = None
        self._slots = slots
        self._epochs = np.full(slots, -1, np.int64)
        """Epoch of the request whose state each slot has."""
        self._state = torch.zeros(slots + 1, layer.hidden_size, dtype=config.compute_dtype, device=device)
        """`[slots + 1, H]` the projected states at the newest token that the target has computed. The last row is
        written where no state is kept."""
        self._next = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        """The position after that token; -1 for none."""
        self._rows = torch.zeros(3, slots, dtype=torch.int64, device=device)
        """Slot, position of the newest token, and end of the positions that may be written, of the requests that get
        drafts. A position of -1 is replaced with that of the newest token. A step adds 1 to the position."""
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(slots, layer.hidden_size, dtype=config.compute_dtype, device=device)
        self._drafts = torch.zeros(config.drafting.depth, slots + 1, dtype=torch.int64, device=device)
        """`[depth, slots + 1]` the last drafts of each slot's request."""
        self._made = np.zeros(slots, np.int64)
        """How many of these drafts follow its newest token."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._items = torch.zeros(slots, ITEM_FIELDS, dtype=torch.int32, device=device)
        self._items[:, 0] = torch.arange(slots, device=device)
        self._items[:, 5] = 1  # splits
        self._items[:, 7] = 1  # the first position has no K and V
        self._numbers = {n: torch.tensor([n], dtype=torch.int32, device=device) for n in _sizes(slots)}
        group = layer.num_heads // layer.num_kv_heads
        self._space = decode_workspace(1, slots, layer.num_kv_heads, group, layer.head_dim, device)
        self._graphs: dict[int, _Graphs] = {}
        self._following: dict[int, torch.cuda.CUDAGraph] = {}
        """`_follow_decodes` by tokens."""
        self._numbers_in_order = torch.arange(config.max_num_batched_tokens, device=device)
        self._memory: Any = None  # memory of all graphs, which run in sequence

    def attach(self, pool: Tensor, last_token: Tensor) -> None:
        """pool: the KV pool. last_token `[slots]`: see `SampleBuffers`."""
        self._kv, self._last_token = self._config.kv.draft_view(pool), last_token

    def capture(self, stream: torch.cuda.Stream, sampled: SampleBuffers, tokens: Iterable[int]) -> None:
        """Load kernels and capture the graphs, in `stream`. tokens: of the pipelines of decodes."""
        most = len(sampled.tokens)
        for n in _sizes(self._slots):
            self._begin(n)
            self._step(n)
            if not self._config.enforce_eager:
                begin, step = (self._captured(partial(f, n), stream) for f in (self._begin, self._step))
                self._graphs[n] = _Graphs(begin, step)
        for t in tokens:
            follow = partial(self._follow_decodes, sampled, min(t, most))
            follow()
            if not self._config.enforce_eager:
                self._following[t] = self._captured(follow, stream)
        self._rows.zero_()
        self._next.fill_(-1)

    def _captured(self, launch: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, self._memory, stream=stream):
            launch()
        return graph

    # -- drafts

    def draft(self, batch: Batch) -> None:
        """Write the drafts of a batch, which are `UNDRAFTED`, to the inputs that were sent."""
        self._forget(batch)
        undrafted = np.flatnonzero(batch.token_ids == UNDRAFTED)
        firsts = np.cumsum(batch.query_len) - batch.query_len
        of = np.repeat(np.arange(batch.num_requests), batch.query_len)[undrafted]
        turn, rows = undrafted - firsts[of] - 1, np.unique(of)
        counts = np.bincount(of, minlength=batch.num_requests)[rows]
        if (self._made[batch.slots[rows]] < counts).any():
            begin = batch.positions[firsts[rows]]
            self._make(batch.slots[rows], begin, begin + counts, int(counts.max()))
        where = self._to_device(np.stack((undrafted, turn, batch.slots[of])).astype(np.int64))
        drafts = self._drafts[where[1], where[2]].int()
        column = self._inputs.column
        column["token_ids"].index_copy_(0, where[0], drafts)
        # Every token of a decode is sampled, so samples and tokens of decodes have the same numbers.
        column["expected"].index_copy_(0, where[0] - 1, drafts)

    def draft_ahead(self, batch: Batch) -> None:
        """After `follow`: make the drafts of the next iteration, if this one has any, as many for each request as this
        one's longest."""
        self._made[batch.slots] = 0
        if not (batch.token_ids == UNDRAFTED).any():
            return
        depth = min(int(batch.query_len[: batch.num_decodes].max()) - 1, len(self._drafts))
        rows = np.unique(batch.sampled_rows)
        slots = batch.slots[rows]
        # The table of the batch has no pages for tokens beyond those that the scheduler knows of.
        held = np.count_nonzero(batch.page_table[rows], 1) * self._config.kv.page_size
        self._make(slots, np.full(len(slots), -1), held, depth)
        self._made[slots] = depth

    def _make(self, slots: np.ndarray, positions: np.ndarray, ends: np.ndarray, depth: int) -> None:
        """Draft `depth` tokens for each of these slots; see `_rows`."""
        n = next(size for size in _sizes(self._slots) if size >= len(slots))
        given = np.zeros((3, n), np.int64)
        given[0, len(slots) :] = self._slots
        given[:, : len(slots)] = slots, positions, ends
        self._rows[:, :n].copy_(self._to_device(given), non_blocking=True)
        graphs = self._graphs.get(n)
        if graphs is None:
            self._begin(n)
        else:
            graphs.begin.replay()
        for _ in range(depth):
            if graphs is None:
                self._step(n)
            else:
                graphs.step.replay()

    def _begin(self, n: int) -> None:
        slots, positions, _ = self._rows[:, :n]
        positions.copy_(torch.where(positions < 0, self._next[slots], positions))
        self._hidden[:n].copy_(self._before(slots, positions))
        self._tokens[:n].copy_(self._last_token[slots])
        self._turn.zero_()

    def _before(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the states `[n, H]` at the token before each position; zeros if they are not known."""
        known = self._next[slots] == positions
        return self._state[slots].masked_fill(~known[:, None], 0.0)

    def _step(self, n: int) -> None:
        """Draft one token after each of the first `n` rows."""
        assert self._kv is not None
        layer, table, page_size = self._layer, self._inputs.page_table, self._config.kv.page_size
        slots, positions, ends = self._rows[:, :n]
        # Beyond its end a row computes some token: K and V go to the dummy page, and only what is before is read.
        at = positions.clamp(0, min(len(self._weights.rotary), table.shape[1] * page_size) - 1)
        page_rows = slots.clamp(max=self._slots - 1)
        mapping = (table[page_rows, at // page_size] * page_size + at % page_size) * (positions < ends)
        read, residual = layer.normed(self._tokens[:n], self._hidden[:n])
        layer.write(self._kv, read, at, mapping)
        q = layer.queries(read, at).contiguous()
        self._items[:n, 1] = page_rows
        self._items[:n, 3] = torch.minimum(at + 1, ends)
        mixed = q.new_zeros(n, layer.num_heads * layer.head_dim)
        decode_attention(
            q, self._kv, layer.kv_layer, table, self._items[:n], self._numbers[n], out=mixed, num_sms=self._num_sms,
            space=self._space, windowed=True, portable=True,
        )  # fmt: skip
        logits, hidden = layer.end(mixed, residual)
        tokens = self._weights.ids[logits.argmax(-1)]
        self._tokens[:n].copy_(tokens)
        self._hidden[:n].copy_(hidden)
        self._drafts.index_put_((self._turn, slots), tokens)
        self._turn += 1
        positions += 1

    def _forget(self, batch: Batch) -> None:
        """Drop the states of requests that have left their slots."""
        new = self._epochs[batch.slots] != batch.epochs
        if new.any():
            self._epochs[batch.slots] = batch.epochs
            self._made[batch.slots[new]] = 0
            self._next.index_fill_(0, self._to_device(batch.slots[new].astype(np.int64)), -1)

    # -- after an iteration

    def follow(self, batch: Batch, sampled: SampleBuffers, tokens: int) -> None:
        """Write K and V of an iteration's tokens, and keep the states at each request's newest one. tokens: of the
        pipeline, padding included."""
        self._forget(batch)
        if batch.num_decodes == batch.num_requests:
            if (graph := self._following.get(tokens)) is not None:
                graph.replay()
            else:
                self._follow_decodes(sampled, min(tokens, len(sampled.tokens)))
            return
        t, lengths = batch.num_tokens, batch.query_len
        lasts = np.cumsum(lengths) - 1
        firsts, slots, last = self._to_device(np.stack((lasts + 1 - lengths, batch.slots, lasts)).astype(np.int64))
        positions = self._inputs.column["positions"][:t].long()
        states = F.linear(self.tapped[:t], self._weights.fc)
        before = states.roll(1, 0)
        before[firsts] = self._before(slots, positions[firsts])
        self._write(sampled, before, positions)
        self._keep_newest(sampled, states[:t], positions, len(batch.sampled_rows))
        d = batch.num_decodes
        self._keep(slots[d:], states[last[d:]], positions[last[d:]])

    def _follow_decodes(self, sampled: SampleBuffers, tokens: int) -> None:
        """`follow` of decodes, each of whose tokens is sampled."""
        column = self._inputs.column
        positions, slots = column["positions"][:tokens].long(), column["slots"][:tokens].long()
        states = F.linear(self.tapped[:tokens], self._weights.fc)
        is_first = column["first"][:tokens] == self._numbers_in_order[:tokens]
        before = torch.where(is_first[:, None], self._before(slots, positions), states.roll(1, 0))
        self._write(sampled, before, positions)
        self._keep_newest(sampled, states, positions, tokens)

    def _write(self, sampled: SampleBuffers, before: Tensor, positions: Tensor) -> None:
        assert self._kv is not None
        t = len(positions)
        read, _ = self._layer.normed(sampled.ids[:t].long(), before)
        self._layer.write(self._kv, read, positions, self._inputs.column["slot_mapping"][:t].long())

    def _keep_newest(self, sampled: SampleBuffers, states: Tensor, positions: Tensor, samples: int) -> None:
        """Keep the states of the tokens after which each request's newest token was sampled."""
        column = self._inputs.column
        tokens, bad = sampled.sampled[:, :samples]
        live = self._numbers_in_order[:samples] < self._inputs.count["sampled"]
        newest = live & (sampled.reached[:samples] > 0) & ((tokens != column["expected"][:samples]) | (bad > 0))
        at = column["logit_tokens"][:samples].long()
        kept = torch.where(newest, column["slots"][:samples].long(), self._slots)
        self._keep(kept, states[at], positions[at])

    def _keep(self, slots: Tensor, states: Tensor, positions: Tensor) -> None:
        self._state.index_copy_(0, slots, states)
        self._next.index_copy_(0, slots, positions + 1)
