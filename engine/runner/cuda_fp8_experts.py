"""`Fp8ExpertLayers`: the products of experts in FP8 on a GPU, with the buffers that all layers share.

The operand of the first is the one that the product behind attention has left; where no shared expert follows, what
adds a token's experts up leaves that of the next layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation
from weft.engine.runner.cuda_experts import range_of
from weft.engine.runner.cuda_fp8 import Fp8Layers
from weft.kernels import fp8_experts
from weft.kernels.fp8_experts import Fp8ExpertSpace
from weft.kernels.router import Choice


class Fp8ExpertLayers:
    """Of a model with experts. tokens: of an iteration, at most; choice: of all of them.

    The methods launch one nano-operation; x and sumsq are its tokens' part of the stream and of the sums of squares.
    """

    def __init__(
        self, spec: ModelSpec, layers: Fp8Layers, choice: Choice, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert spec.experts is not None
        self._spec, self._layers, self._choice = spec, layers, choice
        e = spec.experts
        self._sizes = tokens, spec.hidden_size, e.intermediate_size, e.count, e.top
        self._dtype, self._device = dtype, device
        self._spaces = [self._space()]

    def _space(self) -> Fp8ExpertSpace:
        return fp8_experts.expert_space(*self._sizes, self._dtype, self._device)

    def _space_of(self, pipeline: Pipeline, nano: NanoOperation) -> Fp8ExpertSpace:
        """Of a token range: two may be worked on at once. Made when it is first asked for, which is when kernels are
        loaded."""
        index = range_of(pipeline, nano)
        while len(self._spaces) <= index:
            self._spaces.append(self._space())
        return self._spaces[index]

    def gate_up(
        self, layer: int, w: ProductWeights, sumsq: Tensor, nano: NanoOperation, live: Tensor, pipeline: Pipeline
    ) -> None:
        fp8_experts.experts_gate_up(
            self._layers.operand("x", slice(nano.begin, nano.end)), sumsq, self._choice.part(nano.begin, nano.end),
            self._layers.matrix(layer, "experts_gate_up").weight, self._spec.norm.eps,
            activation=self._spec.activation, bias=w.bias, space=self._space_of(pipeline, nano), num_sms=nano.sms,
            num_tokens=live, config=nano.config,
        )  # fmt: skip

    def residual(
        self, layer: int, w: ProductWeights, x: Tensor, sumsq: Tensor, nano: NanoOperation, live: Tensor,
        pipeline: Pipeline,
    ) -> Tensor:  # fmt: skip
        """x is added to in place. Returns the sums of squares, one part: in `sumsq [parts, tokens]`."""
        assert self._spec.experts is not None
        reader = None if self._spec.experts.shared_size else self._layers.first_of(layer + 1)
        quantized = None if reader is None else self._layers.operand("x", slice(nano.begin, nano.end))
        _, sums = fp8_experts.experts_residual(
            self._choice.part(nano.begin, nano.end), self._layers.matrix(layer, "experts_down").weight, x,
            bias=w.bias, out=x, sumsq=sumsq, quantized=quantized, next_norm=None if reader is None else reader.norm,
            space=self._space_of(pipeline, nano), num_sms=nano.sms, num_tokens=live, config=nano.config,
        )  # fmt: skip
        return sums
