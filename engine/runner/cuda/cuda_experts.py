"""`ExpertLayers`: launches the operations of experts on a GPU. All layers use the same buffers.

`Fp8ExpertLayers` is its FP8 variant: the output projection of attention writes the operand of its first GEMM. If no
shared expert follows, the kernel that adds up a token's experts writes the operand of the next layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation
from weft.engine.runner.cuda.cuda_fp8 import Fp8Layers
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.kernels.common.gpu import is_hopper
from weft.kernels.experts import experts, fp8_experts, router
from weft.kernels.matmul.gemm_config import GemmConfig

_MANY = 1 << 20  # Enough tokens that every expert gets many rows.


class ExpertLayers:
    """Operations of a model with experts. tokens: token limit of an iteration.

    Each method launches one nano-operation. sumsq: partial sums of squares of its tokens' residual stream. live `[1]`:
    number of tokens."""

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        assert spec.experts is not None
        self._spec, self._experts = spec, spec.experts
        e = self._experts
        self._sizes = tokens, spec.hidden_size, e.intermediate_size, e.count, e.top
        self._dtype, self._device = dtype, device
        self._choice = router.choice_buffers(tokens, spec.hidden_size, e.count, e.top, device)
        """Routing of all tokens of an iteration."""
        self._spaces = [self._space()]

    def _space(self) -> Any:
        return experts.expert_space(*self._sizes, self._dtype, self._device)

    def _config(self, it: OperationLaunch) -> GemmConfig | None:
        """Return the tiles of both GEMMs: from the plan, or else chosen by the kernels."""
        _, hidden, inter, count, top = self._sizes
        return it.nano.config or experts.choose(it.nano.end - it.nano.begin, 2 * inter, hidden, count, top)

    def route(self, it: OperationLaunch, sumsq: Tensor | None, live: Tensor) -> None:
        e, w = self._experts, it.projection
        router.route(
            it.x, sumsq, w.weight, self._spec.norm.eps, kind=e.router, top=e.top, normalise=e.normalise,
            scaling=e.scaling, bias=w.bias, choice_bias=w.choice_bias, groups=e.groups, top_groups=e.top_groups,
            out=self._choice.of_tokens(it.nano.begin, it.nano.end), num_tokens=live,
        )  # fmt: skip

    def gate_up(self, it: OperationLaunch, sumsq: Tensor | None, live: Tensor) -> None:
        experts.experts_gate_up(
            it.x, sumsq, self._choice.of_tokens(it.nano.begin, it.nano.end), it.projection.weight, self._spec.norm.eps,
            activation=self._spec.activation, **self._common(it, live),
        )  # fmt: skip

    def residual(self, it: OperationLaunch, x: Tensor, sumsq: Tensor, live: Tensor) -> Tensor:
        """Add to x in place. Returns its sums of squares: the first row of `sumsq [sums, tokens]`."""
        _, sums = experts.experts_residual(
            self._choice.of_tokens(it.nano.begin, it.nano.end), it.projection.weight, x, out=x, sumsq=sumsq,
            **self._common(it, live),
        )  # fmt: skip
        return sums

    def _common(self, it: OperationLaunch, live: Tensor) -> dict[str, Any]:
        """Return the arguments of both GEMMs, without their operands."""
        index = token_range_index(it.pipeline, it.nano)  # two token ranges may run at once
        while len(self._spaces) <= index:  # on first use, which is when kernels are loaded
            self._spaces.append(self._space())
        return {
            "bias": it.projection.bias,
            "space": self._spaces[index],
            "num_sms": it.nano.sms,
            "num_tokens": live,
            "config": self._config(it),
        }


class Fp8ExpertLayers(ExpertLayers):
    """Experts in FP8. invariant: always use the kernel for many rows per expert, so that sums have one order."""

    def __init__(
        self, spec: ModelSpec, layers: Fp8Layers, tokens: int, dtype: torch.dtype, device: torch.device,
        *, invariant: bool = False,
    ) -> None:  # fmt: skip
        self._layers, self._invariant = layers, invariant
        super().__init__(spec, tokens, dtype, device)

    def _space(self) -> Any:
        return fp8_experts.expert_space(*self._sizes, self._dtype, self._device)

    def _config(self, it: OperationLaunch) -> GemmConfig | None:
        if not self._invariant:
            return it.nano.config
        *_, count, top = self._sizes
        blocked = self._layers.matrix(it.layer, "experts_gate_up").weight.scale.dim() == 3
        return fp8_experts.by_rule(_MANY, count, top, hopper=is_hopper(), blocked=blocked)

    def gate_up(self, it: OperationLaunch, sumsq: Tensor | None, live: Tensor) -> None:  # noqa: ARG002
        fp8_experts.experts_gate_up(
            self._layers.operand("x", it.tokens), it.sums, self._choice.of_tokens(it.nano.begin, it.nano.end),
            self._layers.matrix(it.layer, "experts_gate_up").weight, self._spec.norm.eps,
            activation=self._spec.activation, **self._common(it, live),
        )  # fmt: skip

    def residual(self, it: OperationLaunch, x: Tensor, sumsq: Tensor, live: Tensor) -> Tensor:
        reader = None if self._experts.shared_size else self._layers.first_reader(it.layer + 1)
        quantized = None if reader is None else self._layers.operand("x", it.tokens)
        _, sums = fp8_experts.experts_residual(
            self._choice.of_tokens(it.nano.begin, it.nano.end), self._layers.matrix(it.layer, "experts_down").weight,
            x, out=x, sumsq=sumsq, quantized=quantized, next_norm=None if reader is None else reader.norm,
            **self._common(it, live),
        )  # fmt: skip
        return sums


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
