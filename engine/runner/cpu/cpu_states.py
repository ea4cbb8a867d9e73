"""`CpuStates`: computes a model's recurrences on the CPU, from states in pages to states in other pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.memory.kv_layout import page_rows
from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import Recurrence
from weft.engine.model.spec import ModelSpec
from weft.engine.model.state_weights import StateWeights
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.iteration.batch import Batch
from weft.kernels.reference import states as reference
from weft.kernels.reference.states import StateWork


class StateGroup(NamedTuple):
    """Requests whose states are computed together: R of them, with E checkpoints."""

    tokens: slice  # Their rows of the iteration's tokens.
    work: StateWork
    read: Tensor  # [R, n] int64 pages.
    fresh: Tensor  # [R] bool: they start from zeros.
    write: Tensor  # [R + E, n] int64 pages, in the order of `work`.


class StateStep(NamedTuple):
    """The recurrent states of one iteration."""

    decode: tuple[StateGroup, ...]
    prefill: tuple[StateGroup, ...]


class CpuStates:
    """The states of a model in `kv`, the KV pool. alone: compute each request by itself, for batch invariance."""

    def __init__(
        self, spec: ModelSpec, layout: StateLayout, kv: Tensor, *, alone: bool, collectives: Collectives
    ) -> None:
        assert spec.recurrence is not None
        self._own: Recurrence = spec.recurrence
        self._eps, self._alone, self._collectives = spec.norm.eps, alone, collectives
        self._sharers = spec.shard_of.ranks // self._own.key_parts if self._own.kind == "mamba2" else 1
        """Ranks that have a part of the same norm."""
        self._pool, self._layout = page_rows(kv), layout

    def prepare(self, batch: Batch) -> StateStep:
        """Plan an iteration, once for all layers."""
        d, r = batch.num_decodes, batch.num_requests
        spans = [(0, d)], [(d, r)]
        if self._alone:
            spans = [(i, i + 1) for i in range(d)], [(i, i + 1) for i in range(d, r)]
        return StateStep(*(tuple(self._groups(batch, span)) for span in spans))

    def _groups(self, batch: Batch, spans: list[tuple[int, int]]) -> Iterator[StateGroup]:
        rows = batch.states
        assert rows is not None
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(batch.query_len, dtype=np.int64)))
        for begin, end in spans:
            if begin == end:
                continue
            own = slice(begin, end)
            inside = (rows.checkpoint_rows >= begin) & (rows.checkpoint_rows < end)
            length = batch.query_len[own]
            work = reference.plan_states(
                length, batch.kv_len[own] - length, rows.checkpoint_rows[inside] - begin,
                rows.checkpoint_tokens[inside], block=self._own.block,
            )  # fmt: skip
            write = np.concatenate((rows.write[own], rows.checkpoint_pages[inside])).astype(np.int64)
            yield StateGroup(
                slice(int(starts[begin]), int(starts[end])), work, torch.from_numpy(rows.read[own].astype(np.int64)),
                torch.from_numpy(rows.fresh[own].copy()), torch.from_numpy(write),
            )  # fmt: skip

    def run(self, x: Tensor, layer: int, w: StateWeights, group: StateGroup, *, scan: bool) -> Tensor:
        """Compute the recurrence of x `[T, inner]`, the input projection of the group's tokens: returns `[T, width]`,
        and writes the states after them. scan: in blocks; else each request has one token."""
        state = self._layout.read(self._pool, group.read, layer)
        for name, tensor in state.items():
            keep = ~group.fresh.view(-1, *(1 for _ in tensor.shape[1:]))
            state[name] = torch.where(keep, tensor, tensor.new_zeros(()))
        compute = {"gated_delta": self._delta_rule, "mamba2": self._mamba2, "short_conv": self._short_conv}
        y, after = compute[self._own.kind](x, w, state, group.work, scan)
        self._layout.write(self._pool, group.write, layer, after)
        return y

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the convolved columns, the gate z and the scalars."""
        own = self._own
        return x.split((own.channels, own.width, sum(own.scalars.values())), -1)

    def _delta_rule(
        self, x: Tensor, w: StateWeights, state: dict[str, Tensor], work: StateWork, scan: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        own, (mixed, z, scalars) = self._own, self._split(x)
        mixed, conv = reference.causal_conv(mixed, w.conv, w.conv_bias, state["conv"], work)
        q, k, v = mixed.split(list(own.sections.values())[:3], -1)
        q, k = (reference.l2_norm(t.unflatten(-1, (-1, own.key_dim))) for t in (q, k))
        b, a = scalars.chunk(2, -1)
        inputs = (
            q,
            k,
            v.unflatten(-1, (-1, own.value_dim)),
            *reference.delta_gates(a, b, _known(w.a_log), _known(w.time_bias)),
        )
        if scan:
            y, after = reference.delta_rule_scan(*inputs, state["recurrent"], work)
        else:
            y, after = reference.delta_rule_step(*inputs, state["recurrent"])
            after = after[work.end_rows]
        y = reference.gated_norm(y.flatten(1), z, _known(w.norm), self._eps, groups=own.heads, norm_first=True)
        return y, {"conv": conv, "recurrent": after}

    def _mamba2(
        self, x: Tensor, w: StateWeights, state: dict[str, Tensor], work: StateWork, scan: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        own, (mixed, z, t) = self._own, self._split(x)
        mixed, conv = reference.causal_conv(mixed, w.conv, w.conv_bias, state["conv"], work)
        h, b, c = mixed.split(list(own.sections.values())[:3], -1)
        b, c = (each.unflatten(-1, (-1, own.key_dim)) for each in (b, c))
        steps = reference.time_steps(t, _known(w.time_bias), (own.least_step, own.most_step))
        inputs = h.unflatten(-1, (-1, own.value_dim)), steps, -_known(w.a_log).exp(), b, c, w.skip
        if scan:
            y, after = reference.ssd_scan(*inputs, state["recurrent"], work)
        else:
            y, after = reference.ssd_step(*inputs, state["recurrent"])
            after = after[work.end_rows]
        y = reference.gated_norm(
            y.flatten(1),
            z,
            _known(w.norm),
            self._eps,
            groups=own.key_heads,
            norm_first=False,
            means=self._means if self._sharers > 1 else None,
        )
        return y, {"conv": conv, "recurrent": after}

    def _means(self, own: Tensor) -> Tensor:
        """Average over the ranks that share a group of a norm. own: this rank's mean squares."""
        first = self._collectives.rank // self._sharers * self._sharers
        return self._collectives.all_gather(own)[first : first + self._sharers].mean(0)

    def _short_conv(
        self,
        x: Tensor,
        w: StateWeights,
        state: dict[str, Tensor],
        work: StateWork,
        scan: bool,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before, behind, h = x.chunk(3, -1)
        y, conv = reference.causal_conv(before * h, w.conv, w.conv_bias, state["conv"], work, activation=None)
        return behind * y, {"conv": conv}


def _known(weight: Tensor | None) -> Tensor:
    assert weight is not None  # of every recurrence but a short convolution
    return weight
