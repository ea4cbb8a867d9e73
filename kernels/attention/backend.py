"""The interface of attention backends; `backends` makes one by its name.

Data that depends on an iteration's lengths is in a step; given the step, attention runs once per layer. A `captured`
backend reads lengths and work from device buffers that never move: its step does not change, and its launches may be
part of a CUDA graph. Other backends plan on the host (`HostAttention.prepare`) and run as ordinary launches.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class AttentionUnavailable(ValueError):
    """A backend cannot serve this shape on this device. The message is one line with the remedy."""


class AttentionShape(NamedTuple):
    """The shape and options that a backend is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # dtype of queries and outputs.
    device: torch.device
    kv_dtype: torch.dtype | None = None  # dtype of keys and values in their pages; None: that of the queries.
    windows: tuple[int | None, ...] = (None,)
    """Positions each layer's queries see, including their own, as a repeating pattern; None: all."""
    scale: float | None = None  # Scale of the scores; None: head_dim ** -0.5.
    softcap: float = 0.0  # Soft limit of the scores; 0: none.
    sinks: bool = False  # Whether each head has a logit in the softmax (`sinks [Hq]` of `decode` and `prefill`).
    latent: int = 0  # Columns of a key that are its value too (`reference.latent`); 0: K and V are separate.

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def window(self, layer: int) -> int | None:
        return self.windows[layer % len(self.windows)]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionRequests(Protocol):
    """The R requests of one iteration, on the host (the engine's `Batch`). Decodes come first: one query each, or more
    with drafts, which only backends of the CPU take: on a GPU each draft is a decode (`Batch.by_query`)."""

    @property
    def num_decodes(self) -> int: ...

    @property
    def query_len(self) -> NDArray[np.int32]:
        """[R] queries; rows of q are in request order."""
        ...

    @property
    def kv_len(self) -> NDArray[np.int32]:
        """[R] positions visible to the request's last query, including its own."""
        ...

    @property
    def page_table(self) -> NDArray[np.int32]:
        """[R, P]; padding is page 0."""
        ...

    @property
    def until(self) -> NDArray[np.int32] | None:
        """[T] the last position that each query sees, inside its chunk: its own, or the last of its image. None: all
        see up to their own. Windows bound only the past."""
        ...


Step = TypeVar("Step")
Held = TypeVar("Held")


class AttentionBackend(Protocol[Held]):
    """Causal attention over paged K and V; decodes and prefill chunks may be launched separately.

    q `[T, Hq, D]`; kv `[pages, layers, 2, page_size, Hkv, D]`, with this layer's K and V already in their pages. Each
    call writes its requests' rows of `out [T, Hq * D]` and returns it. T may exceed the number of tokens: other rows of
    `out` do not change. num_sms: SMs to use at most, if the backend can limit its kernels; None: all. sinks `[Hq]` are
    passed by name if the shape has them.

    A backend that `quantizes` also accepts an FP8 GEMM operand as `out`: e4m3 with a scale for each head. Constructors
    raise `AttentionUnavailable`."""

    @property
    def captured(self) -> bool:
        """Whether launches may be captured in a CUDA graph."""
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

    def within(self, step: Held, tokens: int) -> Held:  # noqa: ARG002 (a backend may use it)
        """Return the step for an iteration of at most `tokens` tokens."""
        return step

    def attend(
        self, q: Tensor, kv: Tensor, layer: int, step: Held, *, out: Tensor,
        together: bool = False,  # noqa: ARG002 (likewise)
    ) -> Tensor:  # fmt: skip
        """Compute decodes, then chunks. together: at the same time on every SM, if the backend supports it."""
        self.decode(q, kv, layer, step, out=out)
        return self.prefill(q, kv, layer, step, out=out)


class HostAttention(AttentionBackend[Step], Protocol[Step]):
    """A backend that plans on the host once per iteration. Not captured, no nano-batches: rows of q are in request
    order."""

    def prepare(self, requests: AttentionRequests) -> Step:
        """Plan `decode` and `prefill` of this iteration. Transfers start on the current stream."""
        ...
