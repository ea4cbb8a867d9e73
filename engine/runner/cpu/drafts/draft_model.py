"""`CpuDraftModel`: a small model that drafts, with an executor of its own over the target's pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.engine.model.drafts.draft_model import DraftModel
from weft.engine.model.weights import Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.drafter import draft_in_turn
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.backends import make_host_attention


class CpuDraftModel:
    """See `CpuDrafter`."""

    taps = ()

    def __init__(self, draft: DraftModel, weights: Weights, config: ResolvedConfig, pool: Tensor) -> None:
        spec, kv = draft.layer, config.kv
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, kv.page_size, config.compute_dtype, config.device,
            kv.dtype, (None,), spec.attention_scale, spec.attention_softcap, spec.sinks,
        )  # fmt: skip
        self._executor = CpuExecutor(
            spec, weights, kv.draft_view(pool), make_host_attention(config.attention, shape),
            dtype=config.compute_dtype, first_kv_layer=kv.first_draft_layer,
        )  # fmt: skip

    def draft(self, batch: Batch, token_ids: Tensor) -> None:
        draft_in_turn(batch, token_ids, self._step)

    def _step(self, decodes: Batch, token_ids: Tensor, _rows: I32) -> Tensor:
        x, sumsq = self._executor.forward(self._executor.inputs(decodes, token_ids))
        return self._executor.logits(x, sumsq, torch.arange(len(token_ids))).argmax(-1)

    def follow(self, batch: Batch, token_ids: Tensor, tapped: list[Tensor], last: I32) -> None:  # noqa: ARG002
        """Decodes without drafts, chunks and the last draft of each request have no K and V yet."""
        nothing = batch.sampling._replace(logit_tokens=np.zeros(0, np.int32))
        unread = batch._replace(sampling=nothing, prompt_logprobs=(), pooled=(), adapters=None)
        self._executor.forward(self._executor.inputs(unread, token_ids))
