"""`CpuMtp`: the target's layer for multi-token prediction, which drafts on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.mtp import MtpLayer, MtpWeights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.states import HidingAttention, StateDrafter
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.reference import layer as reference


class CpuMtp(StateDrafter):
    """A state is the target's after its final norm, or the layer's after its own."""

    def __init__(
        self, draft: MtpLayer, weights: MtpWeights, target: CpuExecutor, config: ResolvedConfig, pool: Tensor
    ) -> None:
        spec, kv = draft.layer, config.kv
        super().__init__((target.spec.num_layers,), config.max_num_seqs, spec.hidden_size, config.compute_dtype)
        self._own, self._target = weights, target
        own = weights.layer
        self._table = own.embedding if len(own.embedding) else target.weights.embedding
        shape = AttentionShape(
            spec.num_heads, kv.drafts[1], kv.drafts[2], kv.page_size, config.compute_dtype, config.device, kv.dtype,
            (None,), spec.attention_scale, spec.attention_softcap, spec.sinks,
            0 if spec.latent is None else spec.latent.rank,
        )  # fmt: skip
        head = own.lm_head if len(own.lm_head) else target.weights.lm_head
        self._executor = CpuExecutor(
            spec, replace(own, lm_head=head), kv.draft_view(pool), HidingAttention(shape), dtype=config.compute_dtype,
            first_kv_layer=kv.first_draft_layer,
        )  # fmt: skip

    def _states(self, tapped: list[Tensor]) -> Tensor:
        (x,), spec, w = tapped, self._target.spec, self._target.weights
        sums = reference.row_sumsq(x, spec.norm.centred)
        return reference.final_norm(x, sums, w.norm, spec.norm.eps, norm_bias=w.norm_bias, centred=spec.norm.centred)

    def _run(self, batch: Batch, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the layer. Returns its stream and the sums of squares."""
        w, eps = self._own, self._executor.spec.norm.eps
        embedded = reference.embed(token_ids, self._table)[0]
        both = torch.cat((_norm(embedded, w.embedded_norm, eps), _norm(before, w.hidden_norm, eps)), -1)
        # What the layer reads is a table with a row for each token.
        self._executor.weights = replace(self._executor.weights, embedding=F.linear(both, w.both))
        return self._executor.forward(self._executor.inputs(batch, torch.arange(len(token_ids))))

    def _write(self, batch: Batch, token_ids: Tensor, before: Tensor) -> None:
        nothing = batch.sampling._replace(logit_tokens=np.zeros(0, np.int32))
        unread = batch._replace(sampling=nothing, prompt_logprobs=(), pooled=(), adapters=None)
        self._run(unread, token_ids, before)

    def _step(self, decodes: Batch, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        x, sumsq = self._run(decodes, token_ids, before)
        rows = torch.arange(len(token_ids))
        return self._executor.logits(x, sumsq, rows).argmax(-1), self._executor.hidden(x, sumsq, rows)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.final_norm(x, reference.row_sumsq(x), weight, eps)
