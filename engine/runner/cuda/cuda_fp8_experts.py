"""`Fp8ExpertLayers`: launches the FP8 GEMMs of experts on a GPU, with buffers that all layers share.

The output projection of attention writes the operand of the first GEMM. If no shared expert follows, the sum over a
token's experts writes the operand of the next layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.cuda.cuda_experts import token_range_index
from weft.engine.runner.cuda.cuda_fp8 import Fp8Layers
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.common.gpu import is_hopper
from weft.kernels.experts import fp8_experts
from weft.kernels.experts.fp8_experts import Fp8ExpertSpace
from weft.kernels.experts.router import Choice
from weft.kernels.matmul.gemm_config import GemmConfig

_MANY = 1 << 20
"""A number of tokens that gives every expert many rows."""


class Fp8ExpertLayers:
    """GEMMs of a model with experts. tokens: token limit of an iteration. choice: routing of all tokens. invariant: use
    the kernel for many rows per expert always, with its order of sums.

    Each method launches one nano-operation. live `[1]`: number of tokens.
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
        """Return the plan's configuration, or None for the kernel's choice."""
        if not self._invariant:
            return it.nano.config
        *_, count, top = self._sizes
        blocked = self._layers.matrix(it.layer, "experts_gate_up").weight.scale.dim() == 3
        return fp8_experts.by_rule(_MANY, count, top, hopper=is_hopper(), blocked=blocked)

    def _common(self, it: Launch, live: Tensor) -> dict[str, Any]:
        """Return the arguments of both GEMMs besides their operands."""
        index = token_range_index(it.pipeline, it.nano)  # two token ranges may run at once
        while len(self._spaces) <= index:  # on first use, which is when kernels are loaded
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
            self._layers.operand("x", it.tokens), it.sums, self._choice.of_tokens(it.nano.begin, it.nano.end),
            self._layers.matrix(it.layer, "experts_gate_up").weight, self._spec.norm.eps,
            activation=self._spec.activation, **self._common(it, live),
        )  # fmt: skip

    def residual(self, it: Launch, live: Tensor) -> Tensor:
        """Add to the stream. Returns its sums of squares, one part."""
        assert self._spec.experts is not None
        reader = None if self._spec.experts.shared_size else self._layers.first_reader(it.layer + 1)
        quantized = None if reader is None else self._layers.operand("x", it.tokens)
        _, sums = fp8_experts.experts_residual(
            self._choice.of_tokens(it.nano.begin, it.nano.end), self._layers.matrix(it.layer, "experts_down").weight,
            it.x, out=it.x, sumsq=it.sumsq, quantized=quantized, next_norm=None if reader is None else reader.norm,
            **self._common(it, live),
        )  # fmt: skip
        return sums
