"""`RankSums`: GEMMs that write a rank's partial sums on a GPU, and the all-reduces that add them to the stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.model.operations import ALL_REDUCE
from weft.engine.model.reductions import directly_reduced
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.cuda.layer_launch import OperationLaunch
from weft.engine.runner.cuda.sum_buffers import SumBuffer, sum_buffers
from weft.engine.runner.device.collectives import DeviceCollectives
from weft.kernels.matmul.mid_projections import linear_project, residual_project
from weft.kernels.matmul.projections import sumsq_buffer
from weft.kernels.matmul.rows import add_normed, row_sumsq


class RankSums:
    """Launches on the current stream. common: arguments of every GEMM besides its operands."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, collectives: DeviceCollectives, tokens: int, dtype: torch.dtype,
        device: torch.device, *, invariant: bool = False,
    ) -> None:  # fmt: skip
        """tokens: token limit of an iteration. invariant: sum the squares of a row in a separate pass, because GEMMs
        sum them in the order of their tiles, which depend on the token count."""
        self._spec, self._layers, self._collectives = spec, weights.layers, collectives
        self._invariant = invariant
        shape = tokens, spec.hidden_size
        self.partials = [collectives.allocate(shape, dtype) for _ in range(2)]
        """Two buffers `[T, H]` of this rank's partial sums until the next all-reduce; see `SumBuffer`."""
        self.summed = collectives.allocate(shape, dtype)  # `[T, H]` sum over all ranks that needs a further pass.
        self._squares = sumsq_buffer(spec.hidden_size, tokens, device)
        """`[sums, T]` sums of squares of partial sums, which are not used."""
        self._buffers = sum_buffers(spec)
        dense = spec.layer_operations() if spec.quantization is None else ()
        self._pushable = frozenset(op.name for op in directly_reduced(dense))
        """GEMMs that may push their tiles to other ranks."""
        self._sum_after = dict[str, str]()  # By such a GEMM, the all-reduce after it.
        before = ""
        for op in spec.layer_operations():
            if op.kernel == ALL_REDUCE and before in self._pushable:
                self._sum_after[before] = op.name
            before = op.name

    def project(self, it: OperationLaunch, common: dict[str, Any]) -> None:
        """Launch a GEMM whose sum over all ranks is added to the stream."""
        if self._try_push(it, common):
            return
        source, w, buffer = it.rows.activations[it.operation.source][it.tokens], it.projection, self._buffer(it)
        partial = self.partials[buffer.turn][it.tokens]
        if buffer.first:
            linear_project(source, None, w.weight, self._spec.norm.eps, bias=w.bias, out=partial, **common)
        else:
            residual_project(
                source, w.weight, partial, out=partial, sumsq=self._squares[:, it.tokens], bias=w.bias, **common
            )  # fmt: skip

    def _try_push(self, it: OperationLaunch, common: dict[str, Any]) -> bool:
        """Launch a GEMM that pushes its tiles to other ranks. Returns False and launches nothing if that is not faster,
        or if the pipeline's all-reduce covers other tokens."""
        name, own = it.operation.name, (it.nano.begin, it.nano.end)
        if name not in self._pushable:
            return False
        begin = self._begin_if_interleaved(it)
        sums = [n for n, op in it.pipeline.operations if op.name == self._sum_after[name]]
        if begin is not None and own not in [(n.begin, n.end) for n in sums]:
            return False
        source, w = it.rows.activations[it.operation.source][it.tokens], it.projection
        return self._collectives.push(
            source, w.weight, w.bias, turn=self._buffer(it).turn, begin=begin,
            among=None if begin is None else it.pipeline.tokens, **common,
        )  # fmt: skip

    @staticmethod
    def _begin_if_interleaved(it: OperationLaunch) -> int | None:
        """Return the start of an operation's tokens if other launches may come between a GEMM and its all-reduce."""
        return it.nano.begin if len(it.pipeline.lanes) > 1 or len(it.pipeline.begins) > 1 else None

    def expert_buffers(self, it: OperationLaunch) -> tuple[Tensor, Tensor]:
        """Return the buffer for partial sums of experts, `[T, H]`, and one for their squares, which are not used."""
        buffer = self._buffer(it)
        partial = self.partials[buffer.turn][it.tokens]
        if buffer.first:
            partial.zero_()
        return partial, self._squares[:, it.tokens]

    def reduce(self, it: OperationLaunch, live: Tensor) -> Tensor:
        """Add all ranks' sums to the stream, after the post-norm if there is one. Returns the written rows of `sumsq`.
        live `[1]`: number of tokens."""
        own, norm, buffer = it.tokens, self._spec.norm, self._buffer(it)
        post_norm = self._layers[it.layer][buffer.last].post_norm
        x, sumsq, partial = it.x, it.sumsq, self.partials[buffer.turn][own]
        options: dict[str, Any] = {"live": live, "num_sms": it.nano.sms, "begin": self._begin_if_interleaved(it)}
        if post_norm is None:
            sums = self._collectives.reduce(partial, x, sumsq, add=True, **options)
        else:
            total, sums = self.summed[own], sumsq[:1]
            self._collectives.reduce(partial, total, sumsq, add=False, **options)
            add_normed(x, total, post_norm, norm.eps, sumsq=sumsq)
        if norm.centred or (self._invariant and post_norm is None):
            return row_sumsq(x, out=sumsq[:1], centred=norm.centred)
        return sums

    def _buffer(self, it: OperationLaunch) -> SumBuffer:
        return self._buffers[it.layer][it.operation.name]
