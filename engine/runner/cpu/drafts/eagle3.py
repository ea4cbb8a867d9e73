"""`CpuEagle3`: an EAGLE-3 head that drafts on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.states import HidingAttention, StateDrafter
from weft.engine.runner.device.eagle3 import Eagle3Layer
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import AttentionShape


class CpuEagle3(StateDrafter):
    """A state is projected from the target's stream at three depths, or is the head's own stream."""

    def __init__(
        self, draft: Eagle3Head, weights: Eagle3Weights, target: CpuExecutor, config: ResolvedConfig, pool: Tensor
    ) -> None:
        layer, kv = draft.layer, config.kv
        super().__init__(draft.taps, config.max_num_seqs, layer.hidden_size, config.compute_dtype)
        self._weights = weights
        self._layer = Eagle3Layer(draft, weights, target.weights.embedding, config)
        self._kv = kv.draft_view(pool)
        shape = AttentionShape(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, kv.page_size, config.compute_dtype, config.device,
            kv.dtype,
        )  # fmt: skip
        self._attention = HidingAttention(shape)

    def _states(self, tapped: list[Tensor]) -> Tensor:
        return F.linear(torch.cat(tapped, -1), self._weights.fc)

    def _write(self, batch: Batch, token_ids: Tensor, before: Tensor) -> None:
        self._write_read(batch, self._layer.normed(token_ids, before)[0])

    def _write_read(self, batch: Batch, read: Tensor) -> None:
        positions = torch.from_numpy(batch.positions).long()
        self._layer.write(self._kv, read, positions, torch.from_numpy(batch.slot_mapping))

    def _step(self, decodes: Batch, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer
        read, residual = layer.normed(token_ids, before)
        self._write_read(decodes, read)
        q = layer.queries(read, torch.from_numpy(decodes.positions).long())
        mixed = q.new_zeros(len(q), layer.num_heads * layer.head_dim)
        self._attention.decode(q, self._kv, layer.kv_layer, self._attention.prepare(decodes), out=mixed)
        logits, stream = layer.end(mixed, residual)
        return self._weights.ids[logits.argmax(-1)], stream
