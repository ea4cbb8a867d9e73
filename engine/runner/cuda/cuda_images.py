"""`CudaImages`: what images change in the layers of a model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.kernels.matmul.image_rows import axes_tensor, put_images, rotary_rows


class CudaImages:
    """Tokens get embeddings of images instead of their ids' (`image_rows`), rotary positions on a grid
    (`rope_positions`) and further embeddings after the first layers (deepstack). All addresses are fixed."""

    def __init__(self, spec: ModelSpec, weights: Weights, inputs: DeviceInputs, rows: Tensor) -> None:
        """rows `[R, 1 + deepstack, H]`: the pool of embeddings."""
        self._spec, self._weights, self._column, self._rows = spec, weights, inputs.column, rows
        device, tokens = inputs.slab.device, inputs.layout.max_tokens
        self._mixed: dict[int, tuple[Tensor, Tensor]] = {}
        """By rotary table: the axis of each pair, and the rows `[T, D/2, 2]` of an iteration's tokens."""
        if inputs.layout.rope:
            for number, (rope, table) in enumerate(zip(spec.ropes, weights.rotary, strict=False)):
                if rope.sections:
                    axes = axes_tensor(rope.axes(table.shape[1]), device)
                    self._mixed[number] = axes, torch.zeros(tokens, *table.shape[1:], device=device)
        self._in_order = torch.arange(tokens, dtype=torch.int32, device=device)
        self._last = [list(spec.layer_operations(layer))[-1] for layer in range(self._rows.shape[1] - 1)]
        """The last operation of each layer that further embeddings are added after."""

    def begin(self, x: Tensor, sumsq: Tensor, outputs: Mapping[str, Any]) -> None:
        """Write an iteration's rotary rows, and the embeddings of images into the stream `[T, H]`, which holds those of
        ids. sumsq `[1, T]`. outputs: `put_images`' arguments for the first layer's FP8 operand, if there is one."""
        tokens = len(x)
        for number, (axes, out) in self._mixed.items():
            positions = self._column["rope_positions"].view(3, -1)
            rotary_rows(self._weights.rotary[number], positions, axes, out=out[:tokens])
        put_images(x, sumsq, self._column["image_rows"][:tokens], self._rows[:, 0], add=False, **outputs)

    def rotary(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the rotary table of a layer and the tokens' rows in it; None: those of text."""
        found = self._mixed.get(self._spec.rotary_table(layer))
        return None if found is None else (found[1], self._in_order)

    def adds_after(self, it: OperationLaunch) -> bool:
        """Return whether further embeddings are added after an operation."""
        return it.layer < len(self._last) and it.operation == self._last[it.layer]

    def add(self, it: OperationLaunch, outputs: Mapping[str, Any]) -> None:
        """Add further embeddings after a layer. outputs: as in `begin`, of the next layer."""
        rows = self._column["image_rows"][it.tokens]
        put_images(it.x, it.sums, rows, self._rows[:, 1 + it.layer], add=True, **outputs)
