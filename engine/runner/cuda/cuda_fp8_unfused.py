"""`UnfusedFp8Layers`: launches unfused FP8 GEMMs on a GPU, for models whose GEMMs cannot write each other's operands.

A separate pass norms and quantises the rows that each GEMM reads (`kernels.matmul.fp8_rows`). GEMMs write 16 bits, and
the passes of 16-bit models follow (`kernels.matmul.heads`, `kernels.matmul.rows`). This is slower than `Fp8Layers`, but
supports any norms, heads and MLPs. Only the first GEMM of a gated MLP writes a quantised operand.
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
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.kernels.formats.fp8 import Fp8Rows
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul.fp8_rows import norm_rows, quantize_rows
from weft.kernels.matmul.heads import place_heads
from weft.kernels.matmul.rows import add_normed, row_sumsq


class UnfusedFp8Layers(Fp8Layers):
    """For dense models with `gpu_limits.unfused_fp8`. A scale always covers 128 columns.

    raw: 16-bit outputs for the pass after a GEMM: "qkv" `[T, (Hq + 2 Hkv) D]`, "h" `[T, I]` of an MLP without a gate,
    and "residual" `[T, H]` if a norm follows it."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, tokens: int, device: torch.device, raw: Mapping[str, Tensor | None],
        *, invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, tokens, device, invariant=invariant)
        self._raw = raw
        if invariant:  # no epilogue norms heads
            self._invariant_options = {
                kind: {"config": fp8_projections.batch_invariant_config(kind)}
                for kind in ("linear", "residual", "gate_up")
            }

    def embedding_outputs(self, pipeline: Pipeline) -> dict[str, Any]:  # noqa: ARG002
        """Return nothing, because `qkv` quantises its input."""
        return {}

    def stream_outputs(self, it: OperationLaunch) -> dict[str, Any]:  # noqa: ARG002
        """Return nothing, as `embedding_outputs`."""
        return {}

    def _raw_rows(self, name: str, it: OperationLaunch) -> Tensor:
        raw = self._raw[name]
        assert raw is not None
        return raw[it.tokens]

    def _linear(
        self, it: OperationLaunch, rows: Fp8Rows, sums: Tensor | None, out: Tensor, common: dict[str, Any], *,
        activation: str = "",
    ) -> None:  # fmt: skip
        fp8_projections.linear_project(
            rows, sums, self.matrix(it.layer, it.operation.name).weight, self._spec.norm.eps, activation=activation,
            bias=it.projection.bias, out=out, **common | self._invariant_options.get("linear", {}),
        )  # fmt: skip

    def _stream_operand(self, it: OperationLaunch, live: Tensor) -> tuple[Fp8Rows, Tensor | None]:
        """Return the stream as FP8 operand, and the sums of squares for the GEMM's epilogue."""
        matrix, out = self.matrix(it.layer, it.operation.name), self.operand("x", it.tokens)
        if matrix.norm_bias is None and not matrix.centred:
            quantize_rows(it.x, matrix.norm, out=out, num_tokens=live)
        else:
            norm_rows(
                it.x, matrix.norm, matrix.norm_bias, it.sums, self._spec.norm.eps, centred=matrix.centred, out=out,
                num_tokens=live,
            )  # fmt: skip
        return out, it.sums if self._spec.placement.before and matrix.norm_bias is None else None

    def qkv(self, it: OperationLaunch, heads: tuple[Any, ...], out: Tensor, common: dict[str, Any]) -> None:
        common = dict(common)
        scales: dict[str, Any] = {"kv_scales": common.pop("kv_scales", None)}
        live, raw = common["num_tokens"], self._raw_rows("qkv", it)
        rows, sums = self._stream_operand(it, live)
        self._linear(it, rows, sums, raw, common)
        place_heads(raw, self._spec.norm.eps, *heads, out=out, num_tokens=live, **scales)

    def residual(self, it: OperationLaunch, common: dict[str, Any]) -> Tensor:
        norm, rows, product = self._spec.norm, self._source(it, common["num_tokens"]), it.projection
        if product.post_norm is not None:
            raw = self._raw_rows("residual", it)
            self._linear(it, rows, None, raw, common)
            add_normed(it.x, raw, product.post_norm, norm.eps, sumsq=it.sumsq)
            sums = it.sumsq[:1]
        else:
            _, sums = fp8_projections.residual_project(
                rows, self.matrix(it.layer, it.operation.name).weight, it.x, out=it.x, sumsq=it.sumsq,
                bias=product.bias, **common | self._invariant_options.get("residual", {}),
            )  # fmt: skip
        return row_sumsq(it.x, out=it.sumsq[:1], centred=True) if norm.centred else sums

    def gate_up(self, it: OperationLaunch, common: dict[str, Any]) -> None:
        """Launch an MLP's first GEMM, with or without a gate."""
        live, activation = common["num_tokens"], self._spec.activation
        hidden = self.operand(it.operation.target, it.tokens)
        rows, sums = self._stream_operand(it, live)
        if it.operation.kernel == "gate_up":
            fp8_projections.gate_up_project(
                rows, sums, self.matrix(it.layer, it.operation.name).weight, self._spec.norm.eps,
                activation=activation, bias=it.projection.bias, quantized=hidden,
                **common | self._invariant_options.get("gate_up", {}),
            )  # fmt: skip
            return
        raw = self._raw_rows("h", it)
        self._linear(it, rows, sums, raw, common, activation=activation)
        quantize_rows(raw, out=hidden, num_tokens=live)
