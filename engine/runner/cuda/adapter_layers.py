"""`AdapterLayers`: what LoRA adapters add to projections of an iteration, as further depth of their GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.layer_launch import OperationLaunch, Rows
from weft.kernels.matmul.adapter_depth import More, Scratch, columns, scratch_size, shrink_terms
from weft.kernels.matmul.adapter_work import max_items


class AdapterLayers:
    """Buffers and launches of adapted projections. All tokens are one range, and there is one rank."""

    def __init__(self, slots: AdapterSlots, inputs: DeviceInputs, eps: float, dtype: torch.dtype) -> None:
        self.slots, self._eps = slots, eps
        tokens, device = inputs.layout.max_tokens, inputs.slab.device
        self._terms = {
            width: torch.zeros(tokens, columns(slots.count, width), dtype=dtype, device=device)
            for width in inputs.layout.adapter_widths
        }
        """A times each row, by the width of a slot. The columns of other slots are zero."""
        partial = torch.zeros(scratch_size(tokens, slots.shapes), device=device)
        blocks = max(-(-width // 16) for width in self._terms)
        arrived = torch.zeros(max_items(tokens, slots.count) * blocks, dtype=torch.int32, device=device)
        self._scratch = Scratch(partial, arrived)
        self._whole, self._kept = inputs.adapter_work(), inputs.adapter_work(kept=True)
        self._steps, self._kept_steps = inputs.adapter_steps(), inputs.adapter_steps(kept=True)
        self._last: Rows | None = None

    def further_depth(self, it: OperationLaunch, sums: Tensor | None) -> More | None:
        """Launch A times the rows of a projection, and return the further depth of its GEMM, which must be launched
        next. None: no adapter changes this operation. sums: of the norm before the projection, if there is one."""
        place = self.slots.layers[it.layer].get(it.operation.name)
        if place is None:
            return None
        if it.rows is not self._last or (it.layer == 0 and it.operation.name == "qkv"):
            self._last = it.rows
            for terms in self._terms.values():
                terms[it.tokens].zero_()  # rows had other adapters before
        kept = it.rows.live is not None
        terms = self._terms[place.width][it.tokens]
        shrink_terms(
            it.rows.activations[it.operation.source][it.tokens], place.a, self._kept if kept else self._whole, terms,
            self._scratch, width=place.width, shift=place.shift, sumsq=sums, eps=self._eps,
        )  # fmt: skip
        return More(terms, place.b, (self._kept_steps if kept else self._steps)[place.width])
