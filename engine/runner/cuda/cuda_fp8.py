"""`Fp8Layers`: launches a model's FP8 GEMMs on a GPU, except those of experts, and holds their operands.

A GEMM that adds to the stream also writes the FP8 operand of the next GEMM that reads it, times that GEMM's norm
weight. The embedding does so for the first layer. An MLP's first GEMM writes the operand of its second, and attention
with heads of 128 that of the output projection. After other attention a pass over the rows quantises.

Static activation scales of a checkpoint are ignored: after a norm they would need a separate pass once the whole row is
summed, and the scales computed here are at least as fine (`kernels.formats.fp8`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.kernels.attention.output import slice_output
from weft.kernels.common.gpu import gpu
from weft.kernels.experts.fp8_experts import gate_shared
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul.fp8_rows import quantize_rows


class Fp8Layers:
    """tokens: token limit of an iteration. invariant: a row's sums do not depend on the number of rows. Raises
    `ModelError` if a matrix of the layers is not FP8."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, tokens: int, device: torch.device, *, invariant: bool = False
    ) -> None:
        self._spec, self._layers = spec, weights.layers
        here = gpu(device)
        assert here is not None
        self._num_sms = here.sms
        norm = spec.head_dim if spec.qk_norm == "head" else 0
        self._invariant_options = {
            kind: {"config": fp8_projections.batch_invariant_config(kind, head_norm=norm if kind == "qkv" else 0)}
            for kind in ("qkv", "residual", "gate_up") if invariant
        }  # fmt: skip
        for layer in weights.layers:
            for name, product in layer.items():
                if product.fp8 is None and name != "router":
                    raise ModelError(f"a GPU needs all matrices of the layers in FP8, or none: {name} has 16 bits")
        widths = {"x": spec.hidden_size, "a": spec.num_heads * spec.head_dim, "h": spec.intermediate_size}
        if spec.experts is not None and spec.experts.shared_size:
            widths["s"] = spec.experts.shared_size
        self._operands = {name: fp8_projections.rows_buffer(tokens, width, device) for name, width in widths.items()}
        """FP8 operands of all tokens, by activation."""
        matrices = [product.fp8 for layer in weights.layers for product in layer.values() if product.fp8 is not None]
        by_channel = not any(matrix.weight.blocked for matrix in matrices)
        self._by_tokens = by_channel and spec.experts is None and not invariant
        """Whether the columns per scale of the stream's operand may depend on the number of tokens."""

    def _span(self, pipeline: Pipeline) -> int:
        """Return the columns per scale of the stream's operand. It depends only on the token bucket, so that every plan
        gives the same bits as the serial one."""
        if not self._by_tokens:
            return BLOCK
        width = self._spec.hidden_size
        return fp8_projections.residual_span(pipeline.tokens, width, width, self._num_sms)

    def matrix(self, layer: int, name: str) -> Fp8Matrix:
        matrix = self._layers[layer][name].fp8
        assert matrix is not None
        return matrix

    def operand(self, name: str, tokens: slice, span: int = BLOCK) -> Fp8Rows:
        return self._operands[name].of_tokens(tokens)._replace(span=span)

    def _stream(self, it: OperationLaunch) -> Fp8Rows:
        """Return the operand of GEMMs that read the stream."""
        return self.operand("x", it.tokens, self._span(it.pipeline))

    def embedding_outputs(self, pipeline: Pipeline) -> dict[str, Any]:
        """Return `embed`'s arguments for the first layer's operand."""
        rows = self.operand("x", slice(0, pipeline.tokens), self._span(pipeline))
        return {"quantized": rows, "next_norm": self.matrix(0, "qkv").norm}

    def stream_outputs(self, it: OperationLaunch) -> dict[str, Any]:
        """Return `put_images`' arguments for the operand of the layer after an operation, the last of its layer."""
        reader = self.first_reader(it.layer + 1)
        return {} if reader is None else {"quantized": self._stream(it), "next_norm": reader.norm}

    def fill(self) -> None:
        """See `CudaLayers.fill`."""
        for values, scale, _ in self._operands.values():
            quantize_rows(torch.randn_like(values, dtype=torch.bfloat16), out=Fp8Rows(values, scale, 2 * BLOCK))

    def first_reader(self, layer: int) -> Fp8Matrix | None:
        """Return the first matrix that reads the stream in a layer; None after the last layer."""
        return self.matrix(layer, "qkv") if layer < len(self._layers) else None

    def _reader_after_attention(self, layer: int) -> Fp8Matrix:
        """Return one of the matrices that read the stream after attention. They share a norm."""
        return self.matrix(layer, "gate_up" if "gate_up" in self._layers[layer] else "experts_gate_up")

    def _source(self, it: OperationLaunch, live: Tensor) -> Fp8Rows:
        """Return the operand of a GEMM that adds to the stream."""
        rows = self.operand(it.operation.source, it.tokens)
        if it.operation.source != "a":
            return rows
        attended = slice_output(it.rows.attended, it.tokens)
        return attended if isinstance(attended, Fp8Rows) else quantize_rows(attended, out=rows, num_tokens=live)

    def qkv(self, it: OperationLaunch, heads: tuple[Any, ...], out: Tensor, common: dict[str, Any]) -> None:
        """Launch QKV. heads: arguments of `fp8_projections.qkv_project`."""
        matrix, rows = self.matrix(it.layer, "qkv"), self._stream(it)
        common = common | self._invariant_options.get("qkv", {})
        fp8_projections.qkv_project(
            rows, it.sums, matrix.weight, it.projection.bias, self._spec.norm.eps, *heads, out=out, **common
        )  # fmt: skip

    def residual(self, it: OperationLaunch, common: dict[str, Any]) -> Tensor:
        """Add to the stream after attention or an MLP. Returns the sums of squares written."""
        rows = self._source(it, common["num_tokens"])
        attention = it.operation.source == "a"
        reader = self._reader_after_attention(it.layer) if attention else self.first_reader(it.layer + 1)
        _, sums = fp8_projections.residual_project(
            rows, self.matrix(it.layer, it.operation.name).weight, it.x, out=it.x, sumsq=it.sumsq,
            bias=it.projection.bias, quantized=None if reader is None else self._stream(it),
            next_norm=None if reader is None else reader.norm, **common | self._invariant_options.get("residual", {}),
        )  # fmt: skip
        return sums

    def gate_up(self, it: OperationLaunch, common: dict[str, Any]) -> None:
        """Launch an MLP's first GEMM."""
        out, eps = self.operand(it.operation.target, it.tokens), self._spec.norm.eps
        fp8_projections.gate_up_project(
            self._stream(it), it.sums, self.matrix(it.layer, it.operation.name).weight, eps,
            activation=self._spec.activation, bias=it.projection.bias, quantized=out,
            **common | self._invariant_options.get("gate_up", {}),
        )  # fmt: skip
        if it.projection.gate is not None:
            gate_shared(it.x, it.sums, it.projection.gate, eps, out=out, num_tokens=common["num_tokens"])
