"""`Fp8LayersApart`: products of layers in FP8 on a GPU that stand apart, for models whose products cannot leave each
other's operands.

A pass over the rows norms and quantises what each product reads (`kernels.fp8_rows`); the product leaves 16 bits, and
the passes of models in 16 bits go on from there (`kernels.heads`, `kernels.rows`). Slower than `Fp8Layers`, but nothing
is asked of norms, heads and MLP. The hidden part of a gated MLP alone comes quantised out of its product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda_fp8 import Fp8Layers
from weft.kernels import fp8_projections
from weft.kernels.attention_output import Output
from weft.kernels.fp8 import Fp8Rows
from weft.kernels.fp8_rows import norm_rows, quantize_rows
from weft.kernels.heads import place_heads
from weft.kernels.rows import add_normed, row_sumsq


class Fp8LayersApart(Fp8Layers):
    """Dense models that `cuda_fp8.stands_apart` names. Scales are of 128 columns, whatever `span` is.

    raw: where products leave 16 bits for the pass behind them: "qkv" `[T, (Hq + 2 Hkv) D]`, "h" `[T, I]` of an MLP
    without a gate, and "residual" `[T, H]` where a norm stands behind it.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, tokens: int, device: torch.device, raw: Mapping[str, Tensor | None],
        *, invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, tokens, device, invariant=invariant)
        self._raw = raw
        if invariant:  # no epilogue norms heads here
            self._fixed = {
                kind: {"config": fp8_projections.of_any_count(kind)} for kind in ("linear", "residual", "gate_up")
            }

    def of_embedding(self, pipeline: Pipeline) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: `qkv` quantises what it reads."""
        return {}

    def _room(self, name: str, tokens: slice) -> Tensor:
        raw = self._raw[name]
        assert raw is not None
        return raw[tokens]

    def _linear(
        self, rows: Fp8Rows, sums: Tensor | None, layer: int, name: str, bias: Tensor | None, eps: float, out: Tensor,
        common: dict[str, Any], *, activation: str = "",
    ) -> None:  # fmt: skip
        fp8_projections.linear_project(
            rows, sums, self.matrix(layer, name).weight, eps, activation=activation, bias=bias, out=out,
            **common | self._fixed.get("linear", {}),
        )  # fmt: skip

    def _read(
        self, layer: int, name: str, tokens: slice, x: Tensor, sums: Tensor, eps: float, live: Tensor
    ) -> tuple[Fp8Rows, Tensor | None]:
        """The stream as a product reads it, and the sums of squares that are left to its epilogue."""
        matrix, out = self.matrix(layer, name), self.operand("x", tokens)
        if matrix.norm_bias is None and not matrix.centred:
            quantize_rows(x, matrix.norm, out=out, num_tokens=live)
        else:
            norm_rows(
                x, matrix.norm, matrix.norm_bias, sums, eps, centred=matrix.centred, out=out, num_tokens=live
            )  # fmt: skip
        return out, sums if self._spec.placement.before and matrix.norm_bias is None else None

    def qkv(
        self, layer: int, tokens: slice, product: ProductWeights, x: Tensor, sums: Tensor, eps: float,
        heads: tuple[Any, ...], out: Tensor, span: int, common: dict[str, Any],  # noqa: ARG002
    ) -> None:  # fmt: skip
        """As of `Fp8Layers`; sums are not read where no norm stands before the product."""
        common = dict(common)
        scales: dict[str, Any] = {"kv_scales": common.pop("kv_scales", None)}
        live, raw = common["num_tokens"], self._room("qkv", tokens)
        rows, left = self._read(layer, "qkv", tokens, x, sums, eps, live)
        self._linear(rows, left, layer, "qkv", product.bias, eps, raw, common)
        place_heads(raw, eps, *heads, out=out, num_tokens=live, **scales)

    def residual(
        self, layer: int, tokens: slice, op: Operation, product: ProductWeights, a: Output | None, x: Tensor,
        sumsq: Tensor, span: int, common: dict[str, Any],  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """As of `Fp8Layers`."""
        norm, rows = self._spec.norm, self._source(op, tokens, a, common["num_tokens"])
        if product.post_norm is not None:
            raw = self._room("residual", tokens)
            self._linear(rows, None, layer, op.name, product.bias, norm.eps, raw, common)
            add_normed(x, raw, product.post_norm, norm.eps, sumsq=sumsq)
            sums = sumsq[:1]
        else:
            _, sums = fp8_projections.residual_project(
                rows, self.matrix(layer, op.name).weight, x, out=x, sumsq=sumsq, bias=product.bias,
                **common | self._fixed.get("residual", {}),
            )  # fmt: skip
        return row_sumsq(x, out=sumsq[:1], centred=True) if norm.centred else sums

    def gate_up(
        self, layer: int, tokens: slice, op: Operation, product: ProductWeights, x: Tensor, sums: Tensor, eps: float,
        span: int, common: dict[str, Any],  # noqa: ARG002
    ) -> None:  # fmt: skip
        """An MLP's first product, with a gate or without, from the stream x."""
        live, hidden, activation = common["num_tokens"], self.operand(op.target, tokens), self._spec.activation
        rows, left = self._read(layer, op.name, tokens, x, sums, eps, live)
        if op.kernel == "gate_up":
            fp8_projections.gate_up_project(
                rows, left, self.matrix(layer, op.name).weight, eps, activation=activation, bias=product.bias,
                quantized=hidden, **common | self._fixed.get("gate_up", {}),
            )  # fmt: skip
            return
        raw = self._room("h", tokens)
        self._linear(rows, left, layer, op.name, product.bias, eps, raw, common, activation=activation)
        quantize_rows(raw, out=hidden, num_tokens=live)
