"""`NativeAttention`: the `torch` backend with decodes in C++, which reads keys and values straight from their pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from weft.kernels.attention.backend import AttentionRequests, AttentionShape, HostAttention
from weft.kernels.attention.torch_backend import TorchAttention, TorchStep
from weft.kernels.native import library
from weft.kernels.native.layers import DTYPES, HEAD_DIMS, MAX_GROUP, CDecodes, CPages, CScores, decode_attention


class NativeStep(NamedTuple):
    """The queries of decodes, and the plan of chunks."""

    decodes: CDecodes
    chunks: TorchStep


def serves(shape: AttentionShape) -> bool:
    """Return whether a library is loaded that computes decodes of this shape."""
    fits = shape.head_dim in HEAD_DIMS and shape.group <= MAX_GROUP and not shape.latent
    return library.loaded() is not None and fits and shape.pool_dtype == shape.dtype and shape.dtype in DTYPES


class NativeAttention(HostAttention[NativeStep]):
    """See `backend.HostAttention`. A decode's sums do not depend on the other requests."""

    captured = False

    def __init__(self, shape: AttentionShape, *, batch_invariant: bool = False) -> None:
        self._shape = shape
        self._torch = TorchAttention(shape, batch_invariant=batch_invariant, decodes=False)
        self._scores: dict[int, CScores] = {}

    def prepare(self, requests: AttentionRequests) -> NativeStep:
        d = requests.num_decodes
        tables, ends, queries = requests.page_table[:d], requests.kv_len[:d], requests.query_len[:d]
        if (total := int(queries.sum())) > d:
            # Each query of a decode with drafts is computed as a decode.
            row = np.repeat(np.arange(d), queries)
            first = np.cumsum(queries) - queries
            tables = tables[row]
            ends = (ends - queries + 1)[row] + (np.arange(total) - first[row]).astype(np.int32)
        return NativeStep(CDecodes.of(tables, ends), self._torch.prepare(requests))

    def scores(self, layer: int, sinks: Tensor | None) -> CScores:
        """Return how a layer computes its scores, the same each time."""
        if (made := self._scores.get(layer)) is None:
            shape = self._shape
            scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
            own = sinks if shape.sinks else None
            made = self._scores[layer] = CScores.of(shape.window(layer), scale, shape.softcap, own)
        return made

    def decode(
        self, q: Tensor, kv: Tensor, layer: int, step: NativeStep, *, out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - SMs are a GPU's
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if count := step.decodes.count:
            decode_attention(
                q[:count].contiguous(), CPages.of(kv), layer, step.decodes, self.scores(layer, sinks), out[:count]
            )
        return out

    def prefill(
        self, q: Tensor, kv: Tensor, layer: int, step: NativeStep, *, out: Tensor, num_sms: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._torch.prefill(q, kv, layer, step.chunks, out=out, num_sms=num_sms, sinks=sinks)
