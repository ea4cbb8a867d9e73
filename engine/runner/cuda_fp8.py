"""`Fp8Layers`: the products of a dense model in FP8 on a GPU, and the operands that pass between them.

A product that adds to the stream leaves the operand of the product that reads it next, times that one's norm weight; an
MLP's first product leaves that of its second. Behind the embedding and attention, a pass over the rows quantises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.kernels import fp8_projections
from weft.kernels.fp8 import Fp8Rows
from weft.kernels.fp8_matrix import Fp8Matrix
from weft.kernels.fp8_rows import quantize_rows

HEADS = (64, 128)
"""head sizes whose way into q and the pages is an epilogue of an FP8 product"""


def lacking(spec: ModelSpec, *, invariant: bool) -> str | None:
    """What of a quantised model a GPU's FP8 products cannot do, in a few words; None if they do all of it."""
    asked = spec.quantization
    assert asked is not None
    cases = (
        (asked.activations != "dynamic", f"{asked.activations} activations"),
        (spec.experts is not None, "experts"),
        (spec.shard_of.ranks > 1, "several ranks"),
        (spec.norm.centred or spec.norm.bias, "norms with a mean or a bias"),
        (not spec.placement.before or spec.placement.behind or spec.placement.parallel, "norms at other places"),
        (not spec.gated, "an MLP without a gate"),
        (
            spec.qk_norm == "projection" or spec.head_dim not in HEADS,
            "heads of other sizes, or a norm over all of them",
        ),
        (bool(spec.hidden_size % 16 or spec.intermediate_size % 16), "widths that are no multiple of 16"),
        (invariant, "--batch-invariant"),
    )
    return next((name for is_lacking, name in cases if is_lacking), None)


class Fp8Layers:
    """tokens: of an iteration, at most. Raises `ModelError` where a matrix of the layers is not in FP8."""

    def __init__(self, spec: ModelSpec, weights: Weights, tokens: int, device: torch.device) -> None:
        self._spec, self._layers = spec, weights.layers
        for layer in weights.layers:
            for name, product in layer.items():
                if product.fp8 is None:
                    raise ModelError(
                        f"a GPU multiplies all matrices of the layers in FP8 or none: {name} is in 16 bits"
                    )
        widths = {"x": spec.hidden_size, "a": spec.num_heads * spec.head_dim, "h": spec.intermediate_size}
        self._operands = {name: fp8_projections.rows_buffer(tokens, width, device) for name, width in widths.items()}
        """by activation: of all tokens, as the next product reads it"""

    def _matrix(self, layer: int, name: str) -> Fp8Matrix:
        matrix = self._layers[layer][name].fp8
        assert matrix is not None
        return matrix

    def _operand(self, name: str, tokens: slice) -> Fp8Rows:
        values, scale = self._operands[name]
        return Fp8Rows(values[tokens], scale[:, tokens])

    def _quantized(self, name: str, tokens: slice, x: Tensor, norm: Tensor | None, live: Tensor) -> Fp8Rows:
        return quantize_rows(x, norm, out=self._operand(name, tokens), num_tokens=live)

    def qkv(
        self, layer: int, tokens: slice, product: ProductWeights, x: Tensor, sums: Tensor, eps: float,
        heads: tuple[Any, ...], out: Tensor, common: dict[str, Any],
    ) -> None:  # fmt: skip
        """x and sums `[parts, T]`: of the tokens' part of the stream; heads: see `fp8_projections.qkv_project`."""
        matrix = self._matrix(layer, "qkv")
        if layer == 0:
            rows = self._quantized("x", tokens, x, matrix.norm, common["num_tokens"])
        else:
            rows = self._operand("x", tokens)
        fp8_projections.qkv_project(rows, sums, matrix.weight, product.bias, eps, *heads, out=out, **common)

    def residual(
        self, layer: int, tokens: slice, op: Operation, product: ProductWeights, a: Tensor, x: Tensor, sumsq: Tensor,
        common: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Adds to x; returns the view of sumsq that was written. a: what attention gave; not read behind an MLP."""
        if op.source == "a":
            rows = self._quantized("a", tokens, a, None, common["num_tokens"])
            reader: Fp8Matrix | None = self._matrix(layer, "gate_up")
        else:
            rows = self._operand("h", tokens)
            reader = self._matrix(layer + 1, "qkv") if layer + 1 < len(self._layers) else None
        matrix = self._matrix(layer, op.name)
        _, sums = fp8_projections.residual_project(
            rows, matrix.weight, x, out=x, sumsq=sumsq, bias=product.bias,
            quantized=None if reader is None else self._operand("x", tokens),
            next_norm=None if reader is None else reader.norm, **common,
        )  # fmt: skip
        return sums

    def gate_up(
        self, layer: int, tokens: slice, product: ProductWeights, sums: Tensor, eps: float, common: dict[str, Any]
    ) -> None:
        fp8_projections.gate_up_project(
            self._operand("x", tokens), sums, self._matrix(layer, "gate_up").weight, eps,
            activation=self._spec.activation, bias=product.bias, quantized=self._operand("h", tokens), **common,
        )  # fmt: skip
