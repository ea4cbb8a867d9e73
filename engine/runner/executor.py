"""`Executor`: turns a period of nano-operations into streams, events and kernel launches over the whole model.

It owns the activations. Everything it launches has a fixed grid and reads counts and work lists from device memory, so
a captured run serves every iteration of its token bucket.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.plan import TOKEN_STEP, Edge, NanoOperation, Period
from weft.engine.runner.cuda_inputs import DeviceInputs
from weft.kernels import resident
from weft.kernels.attention import AttentionBackend
from weft.kernels.attention_triton import TritonStep
from weft.kernels.decode_workspace import decode_workspace
from weft.kernels.dependent_launch import dependent_launch
from weft.kernels.embedding import embed, final_norm, row_sumsq
from weft.kernels.gemm import matmul
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gemm_launch import choose, workspace
from weft.kernels.projections import gate_up_project, qkv_project, residual_project, sumsq_buffer

INVARIANT_PART_TOKENS = 1024
"""with batch invariance, a request's decode attention is always cut here"""


class Executor:
    """The layers of one model on one GPU. Launches on the current stream and, for other lanes, on its own.

    attention: the back end; one that plans on the host must have its `steps` set before each run.
    invariant: one accumulation order for every product, sum of squares and attention, whatever shares the batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        inputs: DeviceInputs,
        dtype: torch.dtype,
        attention: AttentionBackend[Any],
        *,
        invariant: bool = False,
    ) -> None:
        self.spec, self.weights, self.inputs = spec, weights, inputs
        self.attention, self.invariant = attention, invariant
        device = inputs.slab.device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        t, s = inputs.layout.max_tokens, inputs.layout.max_sampled

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.last_token = buffer(s, kind=torch.int64)
        """[slots] the token that each slot's request sampled last"""
        self.x = buffer(t, spec.hidden_size)
        """[T, H] the residual stream; after a run, that of the last layer"""
        self.logits = buffer(s, spec.vocab_size, kind=torch.float32)
        self._ids = buffer(t, kind=torch.int32)
        self._sumsq = sumsq_buffer(spec.hidden_size, t, device)
        self._q = buffer(t, spec.num_heads, spec.head_dim)
        self._a = buffer(t, spec.num_heads * spec.head_dim)
        self._h = buffer(t, spec.intermediate_size)
        self._rows = buffer(s, spec.hidden_size)
        self._gemm_space = workspace(device, elements=1 << 26)
        self.steps: list[Any] = [self._work(k) for k in range(inputs.layout.nano_batches)]
        """what the attention back end needs, for each nano-batch"""
        self.gates = [torch.cuda.Event(external=True) for _ in range(spec.num_layers)]
        """by layer: where a period's `offload` operation begins; streams outside a captured graph may wait for it"""
        # Attention is launched first where both wait: it has fewer programs and must find its SMs free.
        self._streams = {"memory": torch.cuda.Stream(device, priority=-1), "network": torch.cuda.Stream(device)}

    def _work(self, nano: int) -> TritonStep:
        """The work lists of a nano-batch, with scratch of its own: those of two may be worked on at once."""
        spec, layout = self.spec, self.inputs.layout
        space = decode_workspace(
            layout.max_part_slots, layout.max_tokens, spec.num_kv_heads, spec.heads_per_kv, spec.head_dim,
            self.inputs.slab.device,
        )  # fmt: skip
        decode, prefill = self.inputs.decode_work(nano), self.inputs.prefill_work(nano)
        return TritonStep(self.inputs.page_table, *decode, *prefill, space)

    def forward(self, period: Period, kv: Tensor, num_rows: int) -> None:
        """From the slab to `logits[:num_rows]` of the rows that sample."""
        column, count = self.inputs.column, self.inputs.count
        ids, x = self._ids[: period.tokens], self.x[: period.tokens]
        resident.prepare(
            column["token_ids"], column["token_slots"], self.last_token, self.inputs.page_table, column["update_at"],
            column["update_page"], count["updates"], out=ids,
        )  # fmt: skip
        embed(ids, self.weights.embedding, out=x, sumsq=self._sumsq[:, : period.tokens])
        sumsq = self._sumsq[: _same(self.layers(period, kv)), : period.tokens]
        rows = self._rows[:num_rows]
        final_norm(x, sumsq, column["logit_tokens"][:num_rows], self.weights.norm, self.spec.rms_norm_eps, out=rows)
        matmul(
            rows, self.weights.lm_head, self.logits[:num_rows], num_sms=self.num_sms, space=self._gemm_space,
            num_tokens=count["sampled"], config=self._config(None, num_rows, self.weights.lm_head),
        )  # fmt: skip

    def layers(self, period: Period, kv: Tensor, only: Collection[NanoOperation] | None = None) -> list[int]:
        """All layers on `x[: period.tokens]`; returns, by block of tokens, how many partial sums of squares they leave.

        only: launch these operations of the period and no others, to time them.
        """
        main = torch.cuda.current_stream()
        operations = period.operations
        waits: list[list[Edge]] = [[] for _ in operations]
        for edge in period.dependencies(self.spec):
            if operations[edge.before].lane != operations[edge.after].lane:
                waits[edge.after].append(edge)
        awaited = {edge.before for edges in waits for edge in edges}
        lanes = {op.lane for op in operations if op.lane != "compute"}
        for lane in lanes:
            self._streams[lane].wait_stream(main)
        # rows of `sumsq` that hold sums, by block of tokens: the embedding writes one, a product one per feature tile
        parts = [1] * -(-period.tokens // TOKEN_STEP)
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        index = {id(op): i for i, op in enumerate(operations)}
        gate = period.gate
        for layer, op in period.unrolled(self.spec.num_layers):
            if only is not None and op not in only:
                continue
            i = index[id(op)]
            turn = layer - int(op.next_layer)
            stream = main if op.lane == "compute" else self._streams[op.lane]
            for edge in waits[i]:
                if (event := events.get((edge.before, turn + edge.distance))) is not None:
                    stream.wait_event(event)
            if op is gate:
                self.gates[layer].record(stream)
            # Launched early, the waiting programs of one lane would sit on the SMs that another lane is to have.
            with torch.cuda.stream(stream), dependent_launch(not lanes):
                self._launch(op, layer, kv, parts, period)
            if i in awaited:
                event = events[i, turn] = torch.cuda.Event()
                event.record(stream)
        for lane in lanes:
            main.wait_stream(self._streams[lane])
        return parts

    def _launch(self, op: NanoOperation, layer: int, kv: Tensor, parts: list[int], period: Period) -> None:
        spec, w = self.spec, self.weights.layers[layer]
        own = slice(op.begin, op.end)
        blocks = slice(op.begin // TOKEN_STEP, -(-op.end // TOKEN_STEP))
        x, a, h, space = self.x[own], self._a[own], self._h[own], self._gemm_space
        column, live = self.inputs.column, self.inputs.live(period, op.begin)

        def config(weight: Tensor) -> GemmConfig | None:
            return self._config(op.config, op.end - op.begin, weight)

        match op.operation:
            case "qkv":
                qkv_project(
                    x, self._sumsq[: _same(parts[blocks]), own], w.qkv, w.qkv_bias, spec.rms_norm_eps,
                    self.weights.rotary, column["positions"][own], column["slot_mapping"][own], kv, layer,
                    spec.num_heads, out=self._q[own], num_sms=op.sms, space=space, num_tokens=live,
                    config=config(w.qkv),
                )  # fmt: skip
            case "decode" | "prefill":
                step = self.steps[period.nano_batches.index((op.begin, op.end))]
                attend = self.attention.decode if op.operation == "decode" else self.attention.prefill
                attend(self._q, kv, layer, step, out=self._a, num_sms=op.sms)
            case "o" | "down":
                if op.operation == "o" and w.o_bias is not None:
                    x.add_(w.o_bias)
                value, weight = (a, w.o) if op.operation == "o" else (h, w.down)
                _, sums = residual_project(
                    value, weight, x, out=x, sumsq=self._sumsq[:, own], num_sms=op.sms, space=space, num_tokens=live,
                    config=config(weight),
                )  # fmt: skip
                if self.invariant:  # the parts follow the tiles of the product, and these the token count
                    sums = row_sumsq(x, out=self._sumsq[:1, own])
                parts[blocks] = [sums.shape[0]] * len(parts[blocks])
            case "gate_up":
                gate_up_project(
                    x, self._sumsq[: _same(parts[blocks]), own], w.gate_up, spec.rms_norm_eps, out=h, num_sms=op.sms,
                    space=space, num_tokens=live, config=config(w.gate_up),
                )  # fmt: skip

    def _config(self, given: GemmConfig | None, tokens: int, weight: Tensor) -> GemmConfig | None:
        """The configuration of a product: the plan's, or None for the kernel's own choice; unsplit for invariance."""
        if not self.invariant:
            return given
        features, depth = weight.shape
        return choose(tokens, features, depth, self.num_sms)._replace(split=1)


def _same(parts: list[int]) -> int:
    """How many partial sums a product reads: the products before it must have written equally many for its tokens."""
    if len(set(parts)) != 1:
        raise ConfigError("a plan gives nano-operations that one operation reads together different feature tiles")
    return parts[0]
