"""The interface of attention back ends; `attention_backends` makes one by its name.

Everything that depends on an iteration's lengths is in a step; with it, attention runs once a layer. A back end that is
`captured` reads lengths and work from device memory, in buffers that stay put: its step never changes, and its launches
may be inside a CUDA graph. The others plan on the host (`HostAttention.prepare`) and run as ordinary launches.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class AttentionUnavailable(ValueError):
    """A back end cannot serve this shape here. One line that says what to change."""


class AttentionShape(NamedTuple):
    """What a back end is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    """of queries and outputs"""
    device: torch.device
    kv_dtype: torch.dtype | None = None
    """of keys and values in their pages; None: that of the queries"""
    windows: tuple[int | None, ...] = (None,)
    """of each layer, in a pattern that repeats: how many positions a query sees, its own included; None: all"""
    scale: float | None = None
    """of the scores; None: head_dim ** -0.5"""
    softcap: float = 0.0
    """scores are bent below this; 0: they are not"""
    sinks: bool = False
    """a logit of each head takes part in the softmax (`sinks [Hq]` of `decode` and `prefill`)"""

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def window(self, layer: int) -> int | None:
        return self.windows[layer % len(self.windows)]

    @property
    def group(self) -> int:
        """query heads of one KV head"""
        return self.num_heads // self.num_kv_heads


class AttentionRequests(Protocol):
    """One iteration's R requests, on the host; the engine's `Batch` is one. Decodes come first, one query each."""

    @property
    def num_decodes(self) -> int: ...

    @property
    def query_len(self) -> NDArray[np.int32]:
        """[R] queries; request i's rows of q follow those of request i - 1"""
        ...

    @property
    def kv_len(self) -> NDArray[np.int32]:
        """[R] positions visible to the request's last query, its own included"""
        ...

    @property
    def page_table(self) -> NDArray[np.int32]:
        """[R, P]; padding is page 0"""
        ...


Step = TypeVar("Step")
Held = TypeVar("Held")


class AttentionBackend(Protocol[Held]):
    """Causal attention over paged K and V; decodes and prefill chunks may be launched apart.

    q `[T, Hq, D]`; kv `[pages, layers, 2, page_size, Hkv, D]`, K and V of this layer already in their pages; each call
    writes its requests' rows of `out [T, Hq * D]` and returns it. T may be larger than the requests have tokens: what
    is left of `out` stays as it is. num_sms: SMs to use at most, where the back end can tell its kernels; None: all.
    sinks `[Hq]` are given where the shape says so, and by name.

    A back end that `quantizes` also takes the operand of a product in FP8 as `out`: e4m3, with a scale for each head.

    The constructors raise `AttentionUnavailable`.
    """

    @property
    def captured(self) -> bool:
        """Whether its launches may be captured in a CUDA graph."""
        ...

    @property
    def quantizes(self) -> bool:
        """Whether `out` may be `Fp8Rows` of `Hq * D` columns."""
        return False

    def decode(
        self, q: Tensor, kv: Tensor, layer: int, step: Held, *, out: Tensor, num_sms: int | None = None
    ) -> Tensor: ...

    def prefill(
        self, q: Tensor, kv: Tensor, layer: int, step: Held, *, out: Tensor, num_sms: int | None = None
    ) -> Tensor: ...

    def within(self, step: Held, tokens: int) -> Held:  # noqa: ARG002 (a back end may heed it)
        """The same step where an iteration has so many tokens at most."""
        return step

    def attend(
        self, q: Tensor, kv: Tensor, layer: int, step: Held, *, out: Tensor,
        together: bool = False,  # noqa: ARG002 (likewise)
    ) -> Tensor:  # fmt: skip
        """Decodes, then chunks. together: at the same time on every SM, where a back end can."""
        self.decode(q, kv, layer, step, out=out)
        return self.prefill(q, kv, layer, step, out=out)


class HostAttention(AttentionBackend[Step], Protocol[Step]):
    """A back end that plans on the host once an iteration. Not captured; no nano-batches: rows of q are in the order
    of the requests.
    """

    def prepare(self, requests: AttentionRequests) -> Step:
        """What `decode` and `prefill` need in this iteration. Transfers it starts are on the current stream."""
        ...
