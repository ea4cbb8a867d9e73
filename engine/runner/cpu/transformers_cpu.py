"""`TransformersCpuExecutor`: runs a `transformers` model on the CPU, with attention over weft's pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.memory.kv_layout import page_rows
from weft.engine.model.transformers_impl.hook import attending, mixing
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.runner.device.sampling import pooled_rows
from weft.engine.runner.device.transformers_attention import Context, PagedCalls
from weft.engine.runner.device.transformers_single import SingleRequests
from weft.engine.runner.device.transformers_states import MixerCalls, States
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import HostAttention
from weft.kernels.attention.backends import make_host_attention


class TransformersInputs(NamedTuple):
    """Tensors of one iteration. Those of tokens are `[T]` int64."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    steps: list[Any]  # One for each attention back end.
    rows: Tensor  # Rows whose logits or hidden states are needed, int64.
    batch: Batch


class TransformersCpuExecutor:
    """Has the interface of `CpuExecutor`. The model's code computes logits in its forward pass, so `forward` returns
    the logits of all rows that need them, and the place of each row's."""

    def __init__(self, spec: TransformersSpec, model: TransformersModule, kv: Tensor, config: ResolvedConfig) -> None:
        self._model, self._kv = model, kv
        self._spec, self._states_layout = spec, config.states
        self._mixers = MixerCalls(spec.mixers)
        self._single = SingleRequests(spec, config.kv) if spec.single else None
        self._backends: list[HostAttention[Any]] = []

        def make(shape: Any) -> HostAttention[Any]:
            self._backends.append(make_host_attention(config.attention, shape))
            return self._backends[-1]

        self._calls = PagedCalls(spec, config, make)
        self._hidden: Tensor | None = None  # Hidden states of the last iteration that needed any.

    def inputs(self, batch: Batch, token_ids: Tensor) -> TransformersInputs:
        scored = (asked.token_rows for asked in batch.prompt_logprobs)
        asked = [batch.sampling.logit_tokens, *scored, pooled_rows(batch)]
        return TransformersInputs(
            token_ids,
            torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping),
            [backend.prepare(batch) for backend in self._backends],
            torch.from_numpy(np.unique(np.concatenate(asked)).astype(np.int64)),
            batch,
        )

    def forward(self, inputs: TransformersInputs) -> tuple[Tensor, Tensor]:
        """Return logits `[rows, V]` float32, and the index of each token's row among them, `[T]` int64."""
        batch = inputs.batch
        model = self._model.logits_and_states if batch.pooled else self._logits
        states = None
        if batch.states is not None:
            states = States(self._spec, self._states_layout, batch.states, page_rows(self._kv))
        contexts = _contexts(batch)
        given = inputs.token_ids, inputs.positions
        if self._single is not None:
            found = self._single.forward(
                model, self._kv, batch, states, contexts, given, inputs.slot_mapping, inputs.rows
            )  # fmt: skip
        else:
            self._calls.begin(self._kv, inputs.slot_mapping, inputs.steps, contexts)
            if states is not None:
                self._mixers.begin(states, batch)
            with attending(self._calls), mixing(self._mixers):
                found = model(*given, inputs.rows, self._calls.cache)
            self._calls.end()
        if states is not None:
            states.save()
        logits = found[0]
        if batch.pooled:
            self._hidden = found[1]
        place = torch.zeros(len(inputs.token_ids), dtype=torch.int64)
        place[inputs.rows] = torch.arange(len(inputs.rows))
        return logits.float(), place

    def _logits(self, *given: Any) -> tuple[Tensor]:
        return (self._model.logits(*given),)

    def logits(self, x: Tensor, place: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of the float32 logits `[S, V]` of rows `[S]`."""
        return x[place[rows]]

    def hidden(self, _x: Tensor, place: Tensor, rows: Tensor) -> Tensor:
        """Return the states `[N, H]` after the final norm of rows `[N]` of the last iteration."""
        assert self._hidden is not None
        return self._hidden[place[rows]]


def _contexts(batch: Batch) -> list[Context]:
    ends = np.cumsum(batch.query_len).tolist()
    pages = torch.from_numpy(batch.page_table.astype(np.int64))
    rows = zip(pages, batch.kv_len.tolist(), batch.query_len.tolist(), ends, strict=True)
    return [Context(own, length, end - tokens, end) for own, length, tokens, end in rows]
