"""`BroadCpuExecutor`: a `transformers` model on the CPU, its attention over our pages; as `CpuExecutor`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.model.broad.hook import attending
from weft.engine.model.broad.module import BroadModule
from weft.engine.model.broad.spec import BroadSpec
from weft.engine.runner.device.broad_attention import PagedCalls
from weft.engine.runner.device.pooling import pooled_rows
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import HostAttention
from weft.kernels.attention.backends import make_host_attention


class BroadInputs(NamedTuple):
    """Tensors of one iteration."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slot_mapping: Tensor
    """[T] int64"""
    steps: list[Any]
    """of each attention back end"""
    rows: Tensor
    """int64: rows whose logits, or states, may be asked for"""
    states: bool
    """the states of some are"""


class BroadCpuExecutor:
    """See `CpuExecutor`. The model's own code ends with the logits, so those that will be asked for are computed in
    the forward pass, and what it hands over is these and where each row's are.
    """

    def __init__(self, spec: BroadSpec, model: BroadModule, kv: Tensor, config: ResolvedConfig) -> None:
        self._model, self._kv = model, kv
        self._backends: list[HostAttention[Any]] = []

        def make(shape: Any) -> HostAttention[Any]:
            self._backends.append(make_host_attention(config.attention, shape))
            return self._backends[-1]

        self._calls = PagedCalls(spec, config, make)
        self._states: Tensor | None = None
        """of the last iteration that was asked for some"""

    def inputs(self, batch: Batch, token_ids: Tensor) -> BroadInputs:
        scored = (asked.token_rows for asked in batch.prompt_logprobs)
        asked = [batch.sampling.logit_tokens, *scored, pooled_rows(batch)]
        return BroadInputs(
            token_ids,
            torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping),
            [backend.prepare(batch) for backend in self._backends],
            torch.from_numpy(np.unique(np.concatenate(asked)).astype(np.int64)),
            bool(batch.pooled),
        )

    def forward(self, inputs: BroadInputs) -> tuple[Tensor, Tensor]:
        """Logits `[rows, V]` float32, and which of them is each row's `[T]` int64."""
        self._calls.begin(self._kv, inputs.slot_mapping, inputs.steps)
        with attending(self._calls):
            given = inputs.token_ids, inputs.positions, inputs.rows
            if inputs.states:
                logits, self._states = self._model.logits_and_states(*given)
            else:
                logits = self._model.logits(*given)
        self._calls.end()
        place = torch.zeros(len(inputs.token_ids), dtype=torch.int64)
        place[inputs.rows] = torch.arange(len(inputs.rows))
        return logits.float(), place

    def logits(self, x: Tensor, place: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` float32 logits of the rows `[S]`, a copy."""
        return x[place[rows]]

    def hidden(self, _x: Tensor, place: Tensor, rows: Tensor) -> Tensor:
        """`[N, H]` states behind the final norm of the rows `[N]` of the iteration computed last."""
        assert self._states is not None
        return self._states[place[rows]]
