"""`ExpertLayers`: launches the operations of experts on a GPU, with buffers that all layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.experts import experts, router
from weft.kernels.experts.experts import ExpertSpace
from weft.kernels.experts.router import Choice
from weft.kernels.matmul.gemm_config import GemmConfig


class ExpertLayers:
    """Operations of a model with experts. tokens: token limit of an iteration.

    Each method launches one nano-operation. sumsq: the stream's sums of squares of its tokens. live `[1]`: number of
    tokens.
    """

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        assert spec.experts is not None
        self._spec, self._experts = spec, spec.experts
        e = self._experts
        self._sizes = tokens, spec.hidden_size, e.intermediate_size, e.count, e.top
        self._dtype, self._device = dtype, device
        self.choice: Choice = router.choice_buffers(tokens, spec.hidden_size, e.count, e.top, device)
        """Routing of all tokens of an iteration."""
        # FP8 experts have separate buffers (`cuda_fp8_experts`).
        self._spaces = [self._space()] if spec.quantization is None else []

    def _space(self) -> ExpertSpace:
        return experts.expert_space(*self._sizes, self._dtype, self._device)

    def space(self, index: int) -> ExpertSpace:
        """Return the buffers of a token range, since two ranges may run at once. Allocated on first use, which is when
        kernels are loaded."""
        while len(self._spaces) <= index:
            self._spaces.append(self._space())
        return self._spaces[index]

    def config(self, tokens: int) -> GemmConfig:
        """Return the default tiles of both GEMMs for a number of tokens."""
        _, hidden, inter, count, top = self._sizes
        return experts.choose(tokens, 2 * inter, hidden, count, top)

    def route(self, it: Launch, sumsq: Tensor | None, live: Tensor) -> None:
        e, w = self._experts, it.product
        router.route(
            it.x, sumsq, w.weight, self._spec.norm.eps, kind=e.router, top=e.top, normalise=e.normalise,
            scaling=e.scaling, bias=w.bias, choice_bias=w.choice_bias, groups=e.groups, top_groups=e.top_groups,
            out=self.choice.of_tokens(it.nano.begin, it.nano.end), num_tokens=live,
        )  # fmt: skip

    def gate_up(self, it: Launch, sumsq: Tensor | None, live: Tensor) -> None:
        experts.experts_gate_up(
            it.x, sumsq, self.choice.of_tokens(it.nano.begin, it.nano.end), it.product.weight, self._spec.norm.eps,
            activation=self._spec.activation, bias=it.product.bias, **self._common(it, live),
        )  # fmt: skip

    def residual(self, it: Launch, x: Tensor, sumsq: Tensor, live: Tensor) -> Tensor:
        """Add to x in place. Returns its sums of squares, the first part of `sumsq [parts, tokens]`."""
        _, sums = experts.experts_residual(
            self.choice.of_tokens(it.nano.begin, it.nano.end), it.product.weight, x, bias=it.product.bias, out=x,
            sumsq=sumsq, **self._common(it, live),
        )  # fmt: skip
        return sums

    def _common(self, it: Launch, live: Tensor) -> dict[str, Any]:
        """Return the arguments of both GEMMs besides their operands."""
        return {
            "space": self.space(token_range_index(it.pipeline, it.nano)),
            "num_sms": it.nano.sms,
            "num_tokens": live,
            "config": it.nano.config or self.config(it.nano.end - it.nano.begin),
        }


def token_range_index(pipeline: Pipeline, nano: NanoOperation) -> int:
    """Return the index of an operation's token range among those of experts. Raises `ConfigError` if the two GEMMs of
    experts have different ranges or tile rows."""
    cuts: dict[str, set[tuple[int, int, int]]] = {"experts_gate_up": set(), "experts_residual": set()}
    for other, op in pipeline.operations:
        if op.kernel in cuts:
            cuts[op.kernel].add((other.begin, other.end, other.config.tokens if other.config is not None else 0))
    first, second = cuts.values()
    if first != second:
        raise ConfigError("a plan must use the same token ranges and tile rows for both GEMMs of experts")
    return sorted((begin, end) for begin, end, _ in first).index((nano.begin, nano.end))
