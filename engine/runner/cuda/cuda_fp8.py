"""`Fp8Layers`: the products of layers in FP8 on a GPU but for those of experts, and the operands between them.

A product that adds to the stream leaves the operand of the product that reads it next, times that one's norm weight, as
the embedding does for the first layer; an MLP's first product leaves that of its second, and attention of heads of 128
that of the product behind it. Behind other attention a pass over the rows quantises.

Static scales of a checkpoint's activations are left aside: behind a norm they could be applied only once a whole row is
summed, in a pass of its own, and the scales made here are at least as fine (`kernels.fp8`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.attention.output import part_of
from weft.kernels.common.gpu import gpu
from weft.kernels.experts.fp8_experts import switch_shared
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul.fp8_rows import quantize_rows


class Fp8Layers:
    """tokens: of an iteration, at most. invariant: a row's sums do not depend on how many rows there are. Raises
    `ModelError` where a matrix of the layers is not in FP8."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, tokens: int, device: torch.device, *, invariant: bool = False
    ) -> None:
        self._spec, self._layers = spec, weights.layers
        here = gpu(device)
        assert here is not None
        self._num_sms = here.sms
        norm = spec.head_dim if spec.qk_norm == "head" else 0
        self._fixed = {
            kind: {"config": fp8_projections.of_any_count(kind, head_norm=norm if kind == "qkv" else 0)}
            for kind in ("qkv", "residual", "gate_up") if invariant
        }  # fmt: skip
        for layer in weights.layers:
            for name, product in layer.items():
                if product.fp8 is None and name != "router":
                    raise ModelError(
                        f"a GPU multiplies all matrices of the layers in FP8 or none: {name} is in 16 bits"
                    )
        widths = {"x": spec.hidden_size, "a": spec.num_heads * spec.head_dim, "h": spec.intermediate_size}
        if spec.experts is not None and spec.experts.shared_size:
            widths["s"] = spec.experts.shared_size
        self._operands = {name: fp8_projections.rows_buffer(tokens, width, device) for name, width in widths.items()}
        """by activation: of all tokens, as the next product reads it"""
        matrices = [product.fp8 for layer in weights.layers for product in layer.values() if product.fp8 is not None]
        by_channel = not any(matrix.weight.blocked for matrix in matrices)
        self._by_tokens = by_channel and spec.experts is None and not invariant
        """whether what many tokens' stream is scaled by may be another than few tokens'"""

    def _span(self, pipeline: Pipeline) -> int:
        """Columns of the stream's operand that share a scale in iterations of this plan: what follows from its bucket
        alone, so that every plan has the bits of the serial one."""
        if not self._by_tokens:
            return BLOCK
        width = self._spec.hidden_size
        return fp8_projections.residual_span(pipeline.tokens, width, width, self._num_sms)

    def matrix(self, layer: int, name: str) -> Fp8Matrix:
        matrix = self._layers[layer][name].fp8
        assert matrix is not None
        return matrix

    def operand(self, name: str, tokens: slice, span: int = BLOCK) -> Fp8Rows:
        return self._operands[name].part(tokens)._replace(span=span)

    def _stream(self, it: Launch) -> Fp8Rows:
        """The operand of the products that read the stream."""
        return self.operand("x", it.tokens, self._span(it.pipeline))

    def of_embedding(self, pipeline: Pipeline) -> dict[str, Any]:
        """What `embed` is told to leave beside the stream: the first layer's operand."""
        rows = self.operand("x", slice(0, pipeline.tokens), self._span(pipeline))
        return {"quantized": rows, "next_norm": self.matrix(0, "qkv").norm}

    def fill(self) -> None:
        """See `CudaLayers.fill`."""
        for values, scale, _ in self._operands.values():
            quantize_rows(torch.randn_like(values, dtype=torch.bfloat16), out=Fp8Rows(values, scale, 2 * BLOCK))

    def first_of(self, layer: int) -> Fp8Matrix | None:
        """The matrix that reads the stream first in a layer; None behind the last one."""
        return self.matrix(layer, "qkv") if layer < len(self._layers) else None

    def _behind_attention(self, layer: int) -> Fp8Matrix:
        """A matrix of those that read the stream there: one norm is before all."""
        return self.matrix(layer, "gate_up" if "gate_up" in self._layers[layer] else "experts_gate_up")

    def _source(self, it: Launch, live: Tensor) -> Fp8Rows:
        """What a product that adds to the stream reads."""
        rows = self.operand(it.operation.source, it.tokens)
        if it.operation.source != "a":
            return rows
        attended = part_of(it.rows.attended, it.tokens)
        return attended if isinstance(attended, Fp8Rows) else quantize_rows(attended, out=rows, num_tokens=live)

    def qkv(self, it: Launch, heads: tuple[Any, ...], out: Tensor, common: dict[str, Any]) -> None:
        """heads: see `fp8_projections.qkv_project`."""
        matrix, rows = self.matrix(it.layer, "qkv"), self._stream(it)
        common = common | self._fixed.get("qkv", {})
        fp8_projections.qkv_project(
            rows, it.sums, matrix.weight, it.product.bias, self._spec.norm.eps, *heads, out=out, **common
        )  # fmt: skip

    def residual(self, it: Launch, common: dict[str, Any]) -> Tensor:
        """Adds to the stream, behind attention or an MLP; returns the view of its sums of squares that was written."""
        rows = self._source(it, common["num_tokens"])
        behind_attention = it.operation.source == "a"
        reader = self._behind_attention(it.layer) if behind_attention else self.first_of(it.layer + 1)
        _, sums = fp8_projections.residual_project(
            rows, self.matrix(it.layer, it.operation.name).weight, it.x, out=it.x, sumsq=it.sumsq, bias=it.product.bias,
            quantized=None if reader is None else self._stream(it), next_norm=None if reader is None else reader.norm,
            **common | self._fixed.get("residual", {}),
        )  # fmt: skip
        return sums

    def gate_up(self, it: Launch, common: dict[str, Any]) -> None:
        """An MLP's first product."""
        out, eps = self.operand(it.operation.target, it.tokens), self._spec.norm.eps
        fp8_projections.gate_up_project(
            self._stream(it), it.sums, self.matrix(it.layer, it.operation.name).weight, eps,
            activation=self._spec.activation, bias=it.product.bias, quantized=out,
            **common | self._fixed.get("gate_up", {}),
        )  # fmt: skip
        if it.product.gate is not None:
            switch_shared(it.x, it.sums, it.product.gate, eps, out=out, num_tokens=common["num_tokens"])
