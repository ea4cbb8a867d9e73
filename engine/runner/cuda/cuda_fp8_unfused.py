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

from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.cuda_fp8 import Fp8Layers
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.formats.fp8 import Fp8Rows
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul.fp8_rows import norm_rows, quantize_rows
from weft.kernels.matmul.heads import place_heads
from weft.kernels.matmul.rows import add_normed, row_sumsq


class Fp8LayersApart(Fp8Layers):
    """Dense models that `gpu_limits.unfused_fp8` names. Scales are of 128 columns, whatever the token count.

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

    def _room(self, name: str, it: Launch) -> Tensor:
        raw = self._raw[name]
        assert raw is not None
        return raw[it.tokens]

    def _linear(
        self, it: Launch, rows: Fp8Rows, sums: Tensor | None, out: Tensor, common: dict[str, Any], *,
        activation: str = "",
    ) -> None:  # fmt: skip
        fp8_projections.linear_project(
            rows, sums, self.matrix(it.layer, it.operation.name).weight, self._spec.norm.eps, activation=activation,
            bias=it.product.bias, out=out, **common | self._fixed.get("linear", {}),
        )  # fmt: skip

    def _read(self, it: Launch, live: Tensor) -> tuple[Fp8Rows, Tensor | None]:
        """The stream as a product reads it, and the sums of squares that are left to its epilogue."""
        matrix, out = self.matrix(it.layer, it.operation.name), self.operand("x", it.tokens)
        if matrix.norm_bias is None and not matrix.centred:
            quantize_rows(it.x, matrix.norm, out=out, num_tokens=live)
        else:
            norm_rows(
                it.x, matrix.norm, matrix.norm_bias, it.sums, self._spec.norm.eps, centred=matrix.centred, out=out,
                num_tokens=live,
            )  # fmt: skip
        return out, it.sums if self._spec.placement.before and matrix.norm_bias is None else None

    def qkv(self, it: Launch, heads: tuple[Any, ...], out: Tensor, common: dict[str, Any]) -> None:
        """As of `Fp8Layers`; sums are not read where no norm stands before the product."""
        common = dict(common)
        scales: dict[str, Any] = {"kv_scales": common.pop("kv_scales", None)}
        live, raw = common["num_tokens"], self._room("qkv", it)
        rows, left = self._read(it, live)
        self._linear(it, rows, left, raw, common)
        place_heads(raw, self._spec.norm.eps, *heads, out=out, num_tokens=live, **scales)

    def residual(self, it: Launch, common: dict[str, Any]) -> Tensor:
        """As of `Fp8Layers`."""
        norm, rows, product = self._spec.norm, self._source(it, common["num_tokens"]), it.product
        if product.post_norm is not None:
            raw = self._room("residual", it)
            self._linear(it, rows, None, raw, common)
            add_normed(it.x, raw, product.post_norm, norm.eps, sumsq=it.sumsq)
            sums = it.sumsq[:1]
        else:
            _, sums = fp8_projections.residual_project(
                rows, self.matrix(it.layer, it.operation.name).weight, it.x, out=it.x, sumsq=it.sumsq,
                bias=product.bias, **common | self._fixed.get("residual", {}),
            )  # fmt: skip
        return row_sumsq(it.x, out=it.sumsq[:1], centred=True) if norm.centred else sums

    def gate_up(self, it: Launch, common: dict[str, Any]) -> None:
        """An MLP's first product, with a gate or without."""
        live, activation = common["num_tokens"], self._spec.activation
        hidden = self.operand(it.operation.target, it.tokens)
        rows, left = self._read(it, live)
        if it.operation.kernel == "gate_up":
            fp8_projections.gate_up_project(
                rows, left, self.matrix(it.layer, it.operation.name).weight, self._spec.norm.eps,
                activation=activation, bias=it.product.bias, quantized=hidden,
                **common | self._fixed.get("gate_up", {}),
            )  # fmt: skip
            return
        raw = self._room("h", it)
        self._linear(it, rows, left, raw, common, activation=activation)
        quantize_rows(raw, out=hidden, num_tokens=live)
