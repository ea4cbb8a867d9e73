"""`AdapterLayers`: launches projections of iterations with LoRA adapters.

What an adapter adds belongs before the epilogue, so these projections store the GEMM's output and process it in a
separate pass. A sum into the stream needs none: what the adapter adds goes there first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.kernels.matmul.adapters import Slots, Work, expand, expand_activated, shrink, shrunk_size
from weft.kernels.matmul.heads import place_heads
from weft.kernels.matmul.mid_projections import linear_project, residual_project
from weft.kernels.matmul.rows import add_normed, row_sumsq


class Layers(Protocol):
    """What adapted projections use of `CudaLayers`."""

    spec: ModelSpec
    inputs: DeviceInputs
    activations: Mapping[str, Tensor]
    page_scales: dict[str, Any]

    def common(self, it: OperationLaunch, /) -> dict[str, Any]: ...

    def heads(self, it: OperationLaunch, /) -> tuple[Any, ...]: ...

    def live(self, it: OperationLaunch, /) -> Tensor: ...

    def stream_sums(self, it: OperationLaunch, /) -> Tensor | None: ...


class AdapterLayers:
    """Buffers and launches of adapted projections. All tokens are one range, and there is one rank."""

    def __init__(self, slots: AdapterSlots, layers: Layers, dtype: torch.dtype) -> None:
        self.slots, self._layers = slots, layers
        inputs = layers.inputs
        tokens, device = inputs.layout.max_tokens, inputs.slab.device
        self._raw = torch.zeros(tokens * slots.max_width, dtype=dtype, device=device)
        self._shrunk = torch.zeros(shrunk_size(tokens, slots.shapes, slots.rank), device=device)
        self._whole, self._kept = inputs.adapter_work(), inputs.adapter_work(kept=True)

    def launch(self, it: OperationLaunch) -> bool:
        """Launch an operation, if adapters can change it. Returns whether they can."""
        slots = self.slots.layers[it.layer].get(it.operation.name)
        if slots is None:
            return False
        work = self._whole if it.rows.live is None else self._kept
        source = it.rows.activations[it.operation.source][it.tokens]
        if it.operation.name == "qkv":
            self._qkv(it, slots, work, source)
        elif it.operation.target == "x":
            self._residual(it, slots, work, source)
        else:
            self._hidden(it, slots, work, source)
        return True

    def _raw_of(self, it: OperationLaunch, slots: Slots) -> Tensor:
        rows, width = it.nano.end - it.nano.begin, sum(slots.widths)
        return self._raw[: rows * width].view(rows, width)

    def _project(self, it: OperationLaunch, slots: Slots, x: Tensor, common: dict[str, Any]) -> Tensor:
        w, eps = it.projection, self._layers.spec.norm.eps
        return linear_project(
            x, self._layers.stream_sums(it), w.weight, eps, bias=w.bias, out=self._raw_of(it, slots), **common
        )

    def _shrink(self, it: OperationLaunch, slots: Slots, work: Work, x: Tensor) -> Tensor:
        sums = None if it.operation.target == "x" else self._layers.stream_sums(it)
        return shrink(x, slots, work, sumsq=sums, eps=self._layers.spec.norm.eps, out=self._shrunk)

    def _qkv(self, it: OperationLaunch, slots: Slots, work: Work, x: Tensor) -> None:
        layers, eps = self._layers, self._layers.spec.norm.eps
        raw = self._project(it, slots, x, layers.common(it))
        expand(self._shrink(it, slots, work, x), slots, work, raw, x.shape[1])
        out = layers.activations[it.operation.target][it.tokens]
        place_heads(raw, eps, *layers.heads(it), out=out, num_tokens=layers.live(it), **layers.page_scales)

    def _residual(self, it: OperationLaunch, slots: Slots, work: Work, a: Tensor) -> None:
        layers, w, norm, depth = self._layers, it.projection, self._layers.spec.norm, a.shape[1]
        shrunk = self._shrink(it, slots, work, a)
        if w.post_norm is None:
            expand(shrunk, slots, work, it.x, depth)
            _, sums = residual_project(
                a, w.weight, it.x, out=it.x, sumsq=it.sumsq, bias=w.bias, eps=norm.eps, centred=norm.centred,
                **layers.common(it),
            )  # fmt: skip
            it.note_sums(sums)
            return
        raw = linear_project(a, None, w.weight, norm.eps, bias=w.bias, out=self._raw_of(it, slots), **layers.common(it))
        add_normed(it.x, expand(shrunk, slots, work, raw, depth), w.post_norm, norm.eps, sumsq=it.sumsq)
        it.note_sums(row_sumsq(it.x, out=it.sumsq[:1], centred=True) if norm.centred else it.sumsq[:1])

    def _hidden(self, it: OperationLaunch, slots: Slots, work: Work, x: Tensor) -> None:
        raw = self._project(it, slots, x, self._layers.common(it))
        out = it.rows.activations[it.operation.target][it.tokens]
        expand_activated(
            self._shrink(it, slots, work, x), slots, work, raw, activation=self._layers.spec.activation, out=out,
            depth=x.shape[1],
        )  # fmt: skip
