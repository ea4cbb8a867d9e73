"""`RankSums`: the partial sums that products of a rank on a GPU leave, and how all ranks' get into the stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.model.operations import ALL_REDUCE
from weft.engine.model.spec import ModelSpec
from weft.engine.model.sums import summed_alone
from weft.engine.model.weights import Weights
from weft.engine.runner.cuda.sum_places import SumPlace, sum_places
from weft.engine.runner.device.collectives import DeviceCollectives
from weft.engine.runner.device.layer_launch import Launch
from weft.kernels.matmul.mid_projections import linear_project, residual_project
from weft.kernels.matmul.projections import sumsq_buffer
from weft.kernels.matmul.rows import add_normed, row_sumsq


class RankSums:
    """Launches on the current stream. common: what every product is told beside its operands."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, collectives: DeviceCollectives, tokens: int, dtype: torch.dtype,
        device: torch.device, *, invariant: bool = False,
    ) -> None:  # fmt: skip
        """tokens: of an iteration, at most. invariant: squares of a row come in one piece: products add up pieces in an
        order that follows their tiles, and these the token count."""
        self._spec, self._layers, self._collectives = spec, weights.layers, collectives
        self._invariant = invariant
        shape = tokens, spec.hidden_size
        self.partials = [collectives.take(shape, dtype) for _ in range(2)]
        """[T, H] each: what this rank's products shall add to the stream, until ranks add up theirs: see `SumPlace`"""
        self.summed = collectives.take(shape, dtype)
        """[T, H] a sum of all ranks that something else follows"""
        self._squares = sumsq_buffer(spec.hidden_size, tokens, device)
        """[parts, T] of partial sums, which nobody reads"""
        self._places = sum_places(spec)
        dense = spec.layer_operations() if spec.quantization is None else ()
        self._alone = frozenset(op.name for op in summed_alone(dense))
        """products that may write to the other ranks themselves"""
        self._sum_of = dict[str, str]()
        """by such a product, the sum behind it"""
        before = ""
        for op in spec.layer_operations():
            if op.kernel == ALL_REDUCE and before in self._alone:
                self._sum_of[before] = op.name
            before = op.name

    def leave(self, it: Launch, common: dict[str, Any]) -> None:
        """A product whose sum over all ranks goes to the stream."""
        if self._pushes(it, common):
            return
        source, w, place = it.rows.activations[it.operation.source][it.tokens], it.product, self._place(it)
        part = self.partials[place.turn][it.tokens]
        if place.first:
            linear_project(source, None, w.weight, self._spec.norm.eps, bias=w.bias, out=part, **common)
        else:
            residual_project(
                source, w.weight, part, out=part, sumsq=self._squares[:, it.tokens], bias=w.bias, **common
            )  # fmt: skip

    def _pushes(self, it: Launch, common: dict[str, Any]) -> bool:
        """Have a product write its part of a sum to the other ranks, where that is quicker; false where it is not, or
        where a pipeline's sum is of other tokens.
        """
        name, own = it.operation.name, (it.nano.begin, it.nano.end)
        if name not in self._alone:
            return False
        begin = self._apart(it)
        sums = [n for n, op in it.pipeline.operations if op.name == self._sum_of[name]]
        if begin is not None and own not in [(n.begin, n.end) for n in sums]:
            return False
        source, w = it.rows.activations[it.operation.source][it.tokens], it.product
        return self._collectives.push(
            source, w.weight, w.bias, turn=self._place(it).turn, begin=begin,
            among=None if begin is None else it.pipeline.tokens, **common,
        )  # fmt: skip

    @staticmethod
    def _apart(it: Launch) -> int | None:
        """Where an operation's tokens begin, if others may be launched between a product and its sum."""
        return it.nano.begin if len(it.pipeline.lanes) > 1 or len(it.pipeline.begins) > 1 else None

    def of_experts(self, it: Launch) -> tuple[Tensor, Tensor]:
        """Where experts add up their part, `[T, H]`, and its squares, which nobody reads."""
        place = self._place(it)
        part = self.partials[place.turn][it.tokens]
        if place.first:
            part.zero_()
        return part, self._squares[:, it.tokens]

    def reduce(self, it: Launch, live: Tensor) -> Tensor:
        """Add all ranks' sums to the stream, behind their norm where they have one. Returns what was written of its
        `sumsq`. live `[1]`: how many of the tokens there are."""
        own, norm, place = it.tokens, self._spec.norm, self._place(it)
        post_norm = self._layers[it.layer][place.last].post_norm
        x, sumsq, part = it.x, it.sumsq, self.partials[place.turn][own]
        options: dict[str, Any] = {"live": live, "num_sms": it.nano.sms, "begin": self._apart(it)}
        if post_norm is None:
            sums = self._collectives.reduce(part, x, sumsq, add=True, **options)
        else:
            total, sums = self.summed[own], sumsq[:1]
            self._collectives.reduce(part, total, sumsq, add=False, **options)
            add_normed(x, total, post_norm, norm.eps, sumsq=sumsq)
        if norm.centred or (self._invariant and post_norm is None):
            return row_sumsq(x, out=sumsq[:1], centred=norm.centred)
        return sums

    def _place(self, it: Launch) -> SumPlace:
        return self._places[it.layer][it.operation.name]
