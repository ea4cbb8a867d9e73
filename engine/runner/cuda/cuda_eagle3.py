"""`CudaEagle3`: an EAGLE-3 head that drafts on a GPU, before the iteration that verifies its drafts.

A draft step is a graph per number of requests, which reads tokens, positions and states from device memory and advances
them. So the host launches it once per draft, and learns the drafts with the iteration's results.
"""

from __future__ import annotations

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
        """Slot, position of the newest token, and number of drafts, of the requests that get drafts. A step adds 1 to
        the position and takes 1 from the number."""
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(slots, layer.hidden_size, dtype=config.compute_dtype, device=device)
        self._drafts = torch.zeros(config.drafting.depth, slots, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._items = torch.zeros(slots, ITEM_FIELDS, dtype=torch.int32, device=device)
        self._items[:, 0] = torch.arange(slots, device=device)
        self._items[:, 5] = 1  # splits
        self._items[:, 7] = 1  # the first position has no K and V
        self._numbers = {n: torch.tensor([n], dtype=torch.int32, device=device) for n in _sizes(slots)}
        group = layer.num_heads // layer.num_kv_heads
        self._space = decode_workspace(1, slots, layer.num_kv_heads, group, layer.head_dim, device)
        self._graphs: dict[int, _Graphs] = {}
        self._memory: Any = None  # memory of all graphs, which run in sequence

    def attach(self, pool: Tensor, last_token: Tensor) -> None:
        """pool: the KV pool. last_token `[slots]`: see `SampleBuffers`."""
        self._kv, self._last_token = self._config.kv.draft_view(pool), last_token

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Load kernels and capture the graphs, in `stream`."""
        for n in _sizes(self._slots):
            self._begin(n)
            self._step(n)
            if not self._config.enforce_eager:
                self._graphs[n] = self._captured(n, stream)

    def _captured(self, n: int, stream: torch.cuda.Stream) -> _Graphs:
        graphs = _Graphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graphs.begin, self._memory, stream=stream):
            self._begin(n)
        with torch.cuda.graph(graphs.step, self._memory, stream=stream):
            self._step(n)
        return graphs

    # -- drafts

    def draft(self, batch: Batch) -> None:
        """Write the drafts of a batch, which are `UNDRAFTED`, to the inputs that were sent."""
        self._forget(batch)
        d = batch.num_decodes
        undrafted = np.flatnonzero(batch.token_ids == UNDRAFTED)
        firsts = (np.cumsum(batch.query_len) - batch.query_len)[:d]
        of = np.repeat(np.arange(batch.num_requests), batch.query_len)[undrafted]
        rows, place = np.unique(of, return_inverse=True)
        n = next(size for size in _sizes(self._slots) if size >= len(rows))
        given = np.zeros((3, n), np.int64)
        given[1] = 1
        given[:, : len(rows)] = batch.slots[rows], batch.positions[firsts[rows]], np.bincount(place)
        turn = undrafted - firsts[of] - 1
        self._rows[:, :n].copy_(self._to_device(given), non_blocking=True)
        where = self._to_device(np.stack((undrafted, turn, place)).astype(np.int64))
        graphs = self._graphs.get(n)
        if graphs is None:
            self._begin(n)
        else:
            graphs.begin.replay()
        for _ in range(int(turn.max()) + 1):
            if graphs is None:
                self._step(n)
            else:
                graphs.step.replay()
        drafts = self._drafts[where[1], where[2]].int()
        column = self._inputs.column
        column["token_ids"].index_copy_(0, where[0], drafts)
        # Every token of a decode is sampled, so samples and tokens of decodes have the same numbers.
        column["expected"].index_copy_(0, where[0] - 1, drafts)

    def _begin(self, n: int) -> None:
        slots, positions, _ = self._rows[:, :n]
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
        slots, positions, left = self._rows[:, :n]
        # Rows that need no more drafts compute some: K and V go to the dummy page, and no result is read.
        at = positions.clamp(max=min(len(self._weights.rotary), table.shape[1] * page_size) - 1)
        mapping = (table[slots, at // page_size] * page_size + at % page_size) * (left > 0)
        read, residual = layer.normed(self._tokens[:n], self._hidden[:n])
        layer.write(self._kv, read, at, mapping)
        q = layer.queries(read, at).contiguous()
        self._items[:n, 1] = slots
        self._items[:n, 3] = at + 1
        mixed = q.new_zeros(n, layer.num_heads * layer.head_dim)
        decode_attention(
            q, self._kv, layer.kv_layer, table, self._items[:n], self._numbers[n], out=mixed, num_sms=self._num_sms,
            space=self._space, windowed=True, portable=True,
        )  # fmt: skip
        logits, hidden = layer.end(mixed, residual)
        tokens = self._weights.ids[logits.argmax(-1)]
        self._tokens[:n].copy_(tokens)
        self._hidden[:n].copy_(hidden)
        self._drafts[:, :n].index_copy_(0, self._turn, tokens[None])
        self._turn += 1
        self._rows[1, :n] += 1
        self._rows[2, :n] -= 1

    def _forget(self, batch: Batch) -> None:
        """Drop the states of requests that have left their slots."""
        new = self._epochs[batch.slots] != batch.epochs
        if new.any():
            self._epochs[batch.slots] = batch.epochs
            self._next.index_fill_(0, self._to_device(batch.slots[new].astype(np.int64)), -1)

    # -- after an iteration

    def follow(self, batch: Batch, sampled: SampleBuffers) -> None:
        """Write K and V of an iteration's tokens, and keep the states at each request's newest one."""
        assert self._kv is not None
        self._forget(batch)
        t, column, lengths = batch.num_tokens, self._inputs.column, batch.query_len
        lasts = np.cumsum(lengths) - 1
        firsts, slots, last = self._to_device(np.stack((lasts + 1 - lengths, batch.slots, lasts)).astype(np.int64))
        positions, mapping = column["positions"][:t].long(), column["slot_mapping"][:t].long()
        states = F.linear(self.tapped[:t], self._weights.fc)
        before = states.roll(1, 0)
        before[firsts] = self._before(slots, positions[firsts])
        self._layer.write(self._kv, self._layer.normed(sampled.ids[:t].long(), before)[0], positions, mapping)
        if not batch.drafted:
            self._keep(slots, states[last], positions[last])
            return
        d, s = batch.num_decodes, batch.decode_tokens
        tokens, bad = sampled.sampled[:, :s]
        newest = (sampled.reached[:s] > 0) & ((tokens != column["expected"][:s]) | (bad > 0))
        kept = torch.where(newest, column["slots"][:s].long(), self._slots)
        self._keep(kept, states[:s], positions[:s])
        self._keep(slots[d:], states[last[d:]], positions[last[d:]])

    def _keep(self, slots: Tensor, states: Tensor, positions: Tensor) -> None:
        self._state.index_copy_(0, slots, states)
        self._next.index_copy_(0, slots, positions + 1)
