"""`CudaRunner`: one captured graph per token bucket, inputs through a pinned ring, nothing waits for the host.

An iteration is two graphs: the model up to the logits, and sampling. Between them go, as ordinary launches and only in
batches that ask for them, logit biases, penalties and log-probabilities. A request's last token stays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Batch, Logprobs, PromptLogprobs, StepResult
from weft.engine.cuda_inputs import MAX_PART_SLOTS, DeviceInputs, Layout
from weft.engine.device import GIB, DevicePlan
from weft.engine.errors import OutOfMemory
from weft.engine.runner import PROMPT_LOGPROB_ROWS
from weft.engine.spec import ModelSpec
from weft.engine.weights import Weights
from weft.kernels import reference, resident, sampling
from weft.kernels.decode_attention import ITEM_FIELDS, decode_attention, decode_workspace
from weft.kernels.embedding import embed, final_norm
from weft.kernels.gemm import matmul, workspace
from weft.kernels.prefill_attention import TILE_FIELDS, prefill_attention
from weft.kernels.projections import gate_up_project, qkv_project, residual_project, sumsq_buffer
from weft.kernels.sampler import sample, sample_scratch

PER_SM = 4
"""programs of decode attention on each SM"""
RESERVE_BYTES = GIB
"""left free beside the KV pool: graphs, and the workspaces of batches with penalties or log-probabilities"""


def token_buckets(max_tokens: int) -> list[int]:
    """Sizes of the captured graphs: powers of two, then steps of 256 or an eighth, up to the dense batch."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    step = 256
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + max(step, sizes[-1] // 8 // 256 * 256))
    return sorted({min(s, max_tokens) for s in sizes})


class _Graphs(NamedTuple):
    model: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph


class _Extras(NamedTuple):
    """Device tensors that come back after the tokens, for batches that asked."""

    rows: np.ndarray
    columns: tuple[Tensor, Tensor, Tensor]


class CudaInFlight:
    """An iteration on the GPU's stream: an event and the pinned buffers that its results arrive in."""

    def __init__(self, batch: Batch, before: torch.cuda.Event | None) -> None:
        self.batch = batch
        self.tokens = torch.empty(len(batch.sampled_rows), dtype=torch.int64, pin_memory=True)
        self.extras: _Extras | None = None
        self.prompts: list[_Extras] = []
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._before = before

    def wait(self) -> StepResult:
        self.end.synchronize()
        return StepResult(
            self.batch,
            self.tokens.numpy().astype(np.int32),
            None if self.extras is None else _columns(self.extras),
            tuple(_columns(p) for p in self.prompts),
            self.begin.elapsed_time(self.end) / 1e3,
            self._before.elapsed_time(self.begin) / 1e3 if self._before is not None else 0.0,
        )


def _columns(extras: _Extras) -> Logprobs:
    ranks, ids, values = (t.numpy() for t in extras.columns)
    return Logprobs(extras.rows.astype(np.int32), ranks, ids, values)


class CudaRunner:
    """The runner of one GPU (see `runner.Runner`). Everything a graph points at is allocated here, once."""

    def __init__(self, spec: ModelSpec, weights: Weights, plan: DevicePlan) -> None:
        self.spec, self.weights, self.plan = spec, weights, plan
        device, dtype = plan.device, plan.dtype
        self._device = device
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._stream = torch.cuda.Stream(device)
        self._buckets = token_buckets(plan.max_num_batched_tokens)
        t, s = plan.max_num_batched_tokens, plan.max_num_seqs
        with torch.cuda.device(device), torch.cuda.stream(self._stream), torch.inference_mode():

            def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
                return torch.zeros(shape, dtype=kind, device=device)

            self._inputs = DeviceInputs(
                Layout.of(t, s, spec.heads_per_kv), device, s, -(-plan.max_model_len // plan.page_size)
            )
            self._last_token = buffer(s, kind=torch.int64)
            self._ids = buffer(t, kind=torch.int32)
            self._x = buffer(t, spec.hidden_size)
            self._sumsq = sumsq_buffer(spec.hidden_size, t, device)
            self._q = buffer(t, spec.num_heads, spec.head_dim)
            self._a = buffer(t, spec.num_heads * spec.head_dim)
            self._h = buffer(t, spec.intermediate_size)
            self._rows = buffer(s, spec.hidden_size)
            self._logits = buffer(s, spec.vocab_size, kind=torch.float32)
            self._tokens = buffer(s, kind=torch.int64)
            self._candidates = sample_scratch(s, device)
            self._gemm_space = workspace(device, elements=1 << 26)
            self._decode_space = decode_workspace(
                MAX_PART_SLOTS, s, spec.num_kv_heads, spec.heads_per_kv, spec.head_dim, device
            )
            self._last_end: torch.cuda.Event | None = None
            self._seen: Tensor | None = None
            self._counts: Tensor | None = None
            # A pool of two pages serves the warm-up, which loads every kernel; what is left then is measured.
            self.kv = self._allocate(2)
            self._warm_up()
            self.kv = self._allocate(self._measure_pages())
            self._graphs = {size: self._capture(size) for size in reversed(self._buckets)}
            self._stream.synchronize()

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    def _allocate(self, pages: int) -> Tensor:
        spec = self.spec
        shape = (pages, spec.num_layers, 2, self.plan.page_size, spec.num_kv_heads, spec.head_dim)
        try:
            return torch.zeros(shape, dtype=self.plan.dtype, device=self._device)
        except torch.OutOfMemoryError:
            raise OutOfMemory(
                f"{pages} KV pages do not fit the GPU: lower --num-pages, --kv-cache-gib or --gpu-memory-utilization"
            ) from None

    def _measure_pages(self) -> int:
        plan, spec = self.plan, self.spec
        page_bytes = plan.page_size * spec.kv_bytes_per_token(plan.dtype.itemsize)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        room = int(total * plan.gpu_memory_utilization) - (total - free) - RESERVE_BYTES
        # Pages that the running requests could never fill are of use as prefix cache alone; they are kept all the same.
        pages = plan.num_pages or room // page_bytes
        if pages < 2 or pages * page_bytes > free:
            raise OutOfMemory(
                f"after weights and buffers {max(room, 0) / GIB:.1f} GiB are left for KV pages of "
                f"{page_bytes / 2**20:.1f} MiB: raise --gpu-memory-utilization or use a smaller model"
            )
        return int(pages)

    def _warm_up(self) -> None:
        for size in self._buckets:
            self._model(size)
            self._sample(size)

    def _capture(self, size: int) -> _Graphs:
        graphs = _Graphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs.model, stream=self._stream):
            self._model(size)
        with torch.cuda.graph(graphs.sample, stream=self._stream):
            self._sample(size)
        return graphs

    def _model(self, size: int) -> None:
        """The serial plan for `size` tokens, from the slab to the logits. Fixed grids, counts in device memory."""
        spec, w, kv, sms, space = self.spec, self.weights, self.kv, self._num_sms, self._gemm_space
        column, count = self._inputs.column, self._inputs.count
        page_table, live = self._inputs.page_table, count["tokens"]
        ids, x, q, a, h = self._ids[:size], self._x[:size], self._q[:size], self._a[:size], self._h[:size]
        sumsq_space = self._sumsq[:, :size]
        positions, slot_mapping = column["positions"][:size], column["slot_mapping"][:size]
        decode_items = column["decode_items"].view(-1, ITEM_FIELDS)
        prefill_items = column["prefill_items"].view(-1, TILE_FIELDS)
        resident.prepare(
            column["token_ids"], column["token_slots"], self._last_token, page_table, column["update_at"],
            column["update_page"], count["updates"], out=ids,
        )  # fmt: skip
        _, sumsq = embed(ids, w.embedding, out=x, sumsq=sumsq_space)
        for i, layer in enumerate(w.layers):
            qkv_project(
                x, sumsq, layer.qkv, layer.qkv_bias, spec.rms_norm_eps, w.rotary, positions, slot_mapping, kv, i,
                spec.num_heads, out=q, num_sms=sms, space=space, num_tokens=live,
            )  # fmt: skip
            decode_attention(
                q, kv, i, page_table, decode_items, count["decode_items"], out=a, num_sms=sms,
                space=self._decode_space, per_sm=PER_SM,
            )  # fmt: skip
            prefill_attention(q, kv, i, page_table, prefill_items, count["prefill_items"], out=a, num_sms=sms)
            if layer.o_bias is not None:
                x.add_(layer.o_bias)
            _, sumsq = residual_project(
                a, layer.o, x, out=x, sumsq=sumsq_space, num_sms=sms, space=space, num_tokens=live
            )
            gate_up_project(
                x, sumsq, layer.gate_up, spec.rms_norm_eps, out=h, num_sms=sms, space=space, num_tokens=live
            )
            _, sumsq = residual_project(
                h, layer.down, x, out=x, sumsq=sumsq_space, num_sms=sms, space=space, num_tokens=live
            )
        rows = min(size, self.plan.max_num_seqs)
        final_norm(x, sumsq, column["logit_tokens"][:rows], w.norm, spec.rms_norm_eps, out=self._rows[:rows])
        matmul(self._rows[:rows], w.lm_head, self._logits[:rows], num_sms=sms, space=space, num_tokens=count["sampled"])

    def _sample(self, size: int) -> None:
        n = min(size, self.plan.max_num_seqs)
        c = {k: v[:n] for k, v in self._inputs.column.items()}
        tokens = self._tokens[:n]
        sample(self._logits[:n], c["temperature"], c["top_k"], c["top_p"], c["min_p"], c["uniform"], out=tokens,
               scratch=self._candidates[:n])  # fmt: skip
        resident.remember(tokens, c["slots"], self._inputs.count["sampled"], self._last_token)

    def launch(self, batch: Batch) -> CudaInFlight:
        size = next(b for b in self._buckets if b >= batch.num_tokens)
        graphs, s = self._graphs[size], batch.sampling
        n = len(s.slots)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            in_flight = CudaInFlight(batch, self._last_end)
            in_flight.begin.record()
            self._inputs.send(
                batch, num_kv_heads=self.spec.num_kv_heads, group=self.spec.heads_per_kv,
                num_programs=self._num_sms * PER_SM, bucket=size,
            )  # fmt: skip
            graphs.model.replay()
            in_flight.prompts = [self._prompt_logprobs(size, asked) for asked in batch.prompt_logprobs]
            asked = np.flatnonzero(s.logprobs >= 0)
            raw = self._logits[self._up(asked)].clone() if len(asked) else None
            self._adjust(batch)
            graphs.sample.replay()
            if s.counted.any():
                rows = self._up(np.flatnonzero(s.counted))
                slots = self._up(s.slots[s.counted].astype(np.int64))
                one = torch.ones((), dtype=torch.int32, device=self._device)
                self._resident_counts()[1].index_put_((slots, self._tokens[rows]), one, accumulate=True)
            in_flight.tokens.copy_(self._tokens[:n], non_blocking=True)
            if raw is not None:
                in_flight.extras = self._down(asked, raw, self._tokens[self._up(asked)], int(s.logprobs.max()))
            in_flight.end.record()
        self._last_end = in_flight.end
        return in_flight

    def close(self) -> None:
        self._stream.synchronize()

    # -- what only some batches ask for

    def _up(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self._device, non_blocking=True)

    def _down(self, rows: np.ndarray, logits: Tensor, tokens: Tensor, top: int) -> _Extras:
        columns = []
        for tensor in sampling.logprobs_of(logits, tokens, top):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            columns.append(pinned)
        return _Extras(rows, (columns[0], columns[1], columns[2]))

    def _adjust(self, batch: Batch) -> None:
        """Penalties and biases, in place on the logits."""
        s = batch.sampling
        for reset in batch.count_resets:
            seen, counts = self._resident_counts()
            seen[reset.slot] = False
            seen[reset.slot, self._up(reset.prompt.astype(np.int64))] = True
            output = self._up(reset.output.astype(np.int64))
            counts[reset.slot] = torch.bincount(output, minlength=self.spec.vocab_size).int() if len(output) else 0
        if s.counted.any():
            seen, counts = self._resident_counts()
            rows, slots = self._up(np.flatnonzero(s.counted)), self._up(s.slots[s.counted].astype(np.int64))
            self._logits[rows] = sampling.apply_penalties(
                self._logits[rows], seen[slots], counts[slots], self._up(s.presence[s.counted]),
                self._up(s.frequency[s.counted]), self._up(s.repetition[s.counted]),
            )  # fmt: skip
        if len(s.bias_rows):
            where = (self._up(s.bias_rows.astype(np.int64)), self._up(s.bias_ids.astype(np.int64)))
            self._logits.index_put_(where, self._up(s.bias_values), accumulate=True)

    def _resident_counts(self) -> tuple[Tensor, Tensor]:
        """(prompt_seen bool, output counts int32) `[slots, V]`, made when the first request with penalties comes."""
        if self._seen is None or self._counts is None:
            shape = (self.plan.max_num_seqs, self.spec.vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._seen, self._counts

    def _prompt_logprobs(self, size: int, asked: PromptLogprobs) -> _Extras:
        """Eager: the graph computed logits of sampled rows only."""
        w, eps = self.weights, self.spec.rms_norm_eps
        x = self._x[:size]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(asked.tokens), PROMPT_LOGPROB_ROWS):
            rows = self._up(asked.tokens[start : start + PROMPT_LOGPROB_ROWS].astype(np.int64))
            targets = self._up(asked.targets[start : start + PROMPT_LOGPROB_ROWS].astype(np.int64))
            picked = x[rows]
            logits = reference.lm_head(picked, picked.float().square().sum(-1), w.norm, w.lm_head, eps)
            parts.append(sampling.logprobs_of(logits, targets, asked.top))
        columns = []
        for tensors in zip(*parts, strict=True):
            tensor = torch.cat(tensors)
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            columns.append(pinned)
        return _Extras(np.arange(len(asked.tokens)), (columns[0], columns[1], columns[2]))
