"""`Fp8ExpertLayers`: the products of experts in FP8 on a GPU, with the buffers that all layers share.

The operand of the first is the one that the product behind attention has left; where no shared expert follows, what
adds a token's experts up leaves that of the next layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.cuda.cuda_experts import range_of
from weft.engine.runner.cuda.cuda_fp8 import Fp8Layers
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.common.gpu import is_hopper
from weft.kernels.experts import fp8_experts
from weft.kernels.experts.fp8_experts import Fp8ExpertSpace
from weft.kernels.experts.router import Choice
from weft.kernels.matmul.gemm_config import GemmConfig

_MANY = 1 << 20
"""tokens: whatever their share of an expert is, it has many rows"""


class Fp8ExpertLayers:
    """Of a model with experts. tokens: of an iteration, at most; choice: of all of them. invariant: one kernel and one
    order of sums, that for many rows of an expert, however many there are.

    The methods launch one nano-operation; live `[1]`: how many tokens there are.
    """

    def __init__(
        self, spec: ModelSpec, layers: Fp8Layers, choice: Choice, tokens: int, dtype: torch.dtype, device: torch.device,
        *, invariant: bool = False,
    ) -> None:  # fmt: skip
        assert spec.experts is not None
        self._spec, self._layers, self._choice = spec, layers, choice
        e = spec.experts
        self._sizes = tokens, spec.hidden_size, e.intermediate_size, e.count, e.top
        self._dtype, self._device = dtype, device
        self._spaces = [self._space()]
        self._invariant = invariant

    def _space(self) -> Fp8ExpertSpace:
        return fp8_experts.expert_space(*self._sizes, self._dtype, self._device)

    def _config(self, it: Launch) -> GemmConfig | None:
        """The plan's, or None for the kernel's own choice."""
        if not self._invariant:
            return it.nano.config
        *_, count, top = self._sizes
        blocked = self._layers.matrix(it.layer, "experts_gate_up").weight.scale.dim() == 3
        return fp8_experts.by_rule(_MANY, count, top, hopper=is_hopper(), blocked=blocked)

    def _common(self, it: Launch, live: Tensor) -> dict[str, Any]:
        """What both products are told beside their operands."""
        index = range_of(it.pipeline, it.nano)  # two token ranges may be worked on at once
        while len(self._spaces) <= index:  # made when first asked for, which is when kernels are loaded
            self._spaces.append(self._space())
        return {
            "bias": it.product.bias,
            "space": self._spaces[index],
            "num_sms": it.nano.sms,
            "num_tokens": live,
            "config": self._config(it),
        }

    def gate_up(self, it: Launch, live: Tensor) -> None:
        fp8_experts.experts_gate_up(
            self._layers.operand("x", it.tokens), it.sums, self._choice.part(it.nano.begin, it.nano.end),
            self._layers.matrix(it.layer, "experts_gate_up").weight, self._spec.norm.eps,
            activation=self._spec.activation, **self._common(it, live),
        )  # fmt: skip

    def residual(self, it: Launch, live: Tensor) -> Tensor:
        """Adds to the stream. Returns its sums of squares, one part."""
        assert self._spec.experts is not None
        reader = None if self._spec.experts.shared_size else self._layers.first_of(it.layer + 1)
        quantized = None if reader is None else self._layers.operand("x", it.tokens)
        _, sums = fp8_experts.experts_residual(
            self._choice.part(it.nano.begin, it.nano.end), self._layers.matrix(it.layer, "experts_down").weight, it.x,
            out=it.x, sumsq=it.sumsq, quantized=quantized, next_norm=None if reader is None else reader.norm,
            **self._common(it, live),
        )  # fmt: skip
        return sums
