"""The `triton` attention backend: kernels over work lists in device memory. May be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from weft.kernels.attention import fp8_attention
from weft.kernels.attention.backend import AttentionBackend, AttentionShape
from weft.kernels.attention.backends import check
from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.fp8_unpack import Unpacked, unpack_pages
from weft.kernels.attention.output import Out
from weft.kernels.attention.prefill_attention import PrefillWorkspace, prefill_attention
from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.formats.fp8 import BLOCK, KvScales

PER_SM = 4  # Programs of decode attention on each SM.
FEW_TOKENS = 32
"""Largest iteration whose decodes over 16-bit pages use the plain kernel: after their GEMMs it is faster than Hopper's
(4 to 7 us per layer on an H200; at 64 and 128 requests at most 2)."""


def cuts_prefill(shape: AttentionShape) -> bool:
    """Return whether tiles may be cut along their keys and share a launch with decodes: on Hopper, 16 bits."""
    return (
        on_gpu(shape.device) and is_hopper() and set(shape.windows) == {None}
        and shape.dtype.itemsize == 2 and shape.pool_dtype == shape.dtype and head_block(shape.head_dim) in (64, 128)
        and shape.group <= 16
    )  # fmt: skip


class DecodeWork(NamedTuple):
    """Decode work of the layers with one window."""

    items: Tensor  # [max_items, ITEM_FIELDS] int32
    number: Tensor  # [1] int32


class PrefillSplits(NamedTuple):
    space: PrefillWorkspace  # Not shared with any step whose launches may run at the same time.
    decoders: Tensor  # [1] int32: programs that begin with decodes if decodes and chunks share a launch.


class TritonStep(NamedTuple):
    """Device buffers with the work of one nano-batch. The tensors never move; their owner fills the lists once per
    iteration with `decode_items` and `prefill_items`."""

    page_table: Tensor  # [rows, max_pages] int32
    decodes: Mapping[int | None, DecodeWork]  # Decode work by window.
    prefill_items: Tensor  # [max_items, TILE_FIELDS] int32
    prefill_count: Tensor  # [1] int32
    space: DecodeWorkspace  # Not shared with any step whose launches may run at the same time.
    unpacked: Unpacked | None = None
    """Chunks whose e4m3 pages are first converted to 16 bits; `prefill_items` has the others."""
    parts: PrefillSplits | None = None
    """Set if tiles of chunks are cut along their keys; `prefill_items` are then `[max_items, SPLIT_FIELDS]`."""
    until: Tensor | None = None
    """[T] int32 last position that each query sees, inside its chunk; None: its own. Tiles are then not cut."""
    plain: bool = False  # Whether the plain kernel computes decodes on Hopper too.


class TritonAttention(AttentionBackend[TritonStep]):
    """See `backend.AttentionBackend`. Raises `AttentionUnavailable` for a shape that the kernels do not support.

    num_sms: SMs of the GPU. `decode_items` cuts the work for `num_sms * PER_SM` programs. kv_scales: of e4m3 pages,
    which have separate kernels (`fp8_attention`). batch_invariant: sums of a decode are added in the same order in any
    batch."""

    captured = True

    def __init__(
        self, shape: AttentionShape, num_sms: int, kv_scales: KvScales | None = None, *, batch_invariant: bool = False
    ) -> None:
        check("triton", shape)
        self._shape, self._num_sms, self._kv_scales = shape, num_sms, kv_scales
        # the plain kernel gathers smaller pages by pointers, which is slow
        self._few = FEW_TOKENS if not batch_invariant and shape.page_size % 64 == 0 else 0

    @property
    def quantizes(self) -> bool:
        return self._shape.head_dim == BLOCK

    def within(self, step: TritonStep, tokens: int) -> TritonStep:
        return step._replace(plain=True) if tokens <= self._few else step

    def decode(
        self, q: Tensor, kv: Tensor, layer: int, step: TritonStep, *, out: Out, num_sms: int | None = None,
        sinks: Tensor | None = None,
    ) -> Out:  # fmt: skip
        shape, window = self._shape, self._shape.window(layer)
        items, count = step.decodes[window]
        if self._kv_scales is not None:
            return fp8_attention.decode_attention(
                q, kv, self._kv_scales, layer, step.page_table, items, count, out=out,
                num_sms=num_sms or self._num_sms, space=step.space, scale=shape.scale, windowed=window is not None,
                softcap=shape.softcap, sinks=sinks,
            )  # fmt: skip
        return decode_attention(
            q, kv, layer, step.page_table, items, count, out=out, num_sms=num_sms or self._num_sms, space=step.space,
            per_sm=PER_SM, scale=shape.scale, windowed=window is not None, softcap=shape.softcap, sinks=sinks,
            portable=step.plain and num_sms in (None, self._num_sms),
        )  # fmt: skip

    def prefill(
        self, q: Tensor, kv: Tensor, layer: int, step: TritonStep, *, out: Out, num_sms: int | None = None,
        sinks: Tensor | None = None,
    ) -> Out:  # fmt: skip
        shape = self._shape
        if self._kv_scales is not None:
            if (wide := step.unpacked) is not None:
                pages = unpack_pages(kv, self._kv_scales, layer, wide, num_sms=num_sms or self._num_sms)
                prefill_attention(
                    q, pages, 0, wide.table, wide.items, wide.num_items, out=out, num_sms=num_sms or self._num_sms,
                    scale=shape.scale, window=shape.window(layer), softcap=shape.softcap, sinks=sinks, until=step.until,
                )  # fmt: skip
            return fp8_attention.prefill_attention(
                q, kv, self._kv_scales, layer, step.page_table, step.prefill_items, step.prefill_count, out=out,
                num_sms=num_sms or self._num_sms, scale=shape.scale, window=shape.window(layer),
                softcap=shape.softcap, sinks=sinks, until=step.until,
            )  # fmt: skip
        return prefill_attention(
            q, kv, layer, step.page_table, step.prefill_items, step.prefill_count, out=out,
            num_sms=num_sms or self._num_sms, scale=shape.scale, window=shape.window(layer), softcap=shape.softcap,
            sinks=sinks, until=step.until, space=None if step.parts is None else step.parts.space,
        )  # fmt: skip

    def attend(
        self, q: Tensor, kv: Tensor, layer: int, step: TritonStep, *, out: Out, num_sms: int | None = None,
        sinks: Tensor | None = None, together: bool = False,
    ) -> Out:  # fmt: skip
        """Compute decodes and chunks: in one launch if tiles are cut, else in sequence. together: in one launch, both
        run on every SM at the same time."""
        if step.parts is None:
            self.decode(q, kv, layer, step, out=out, num_sms=num_sms, sinks=sinks)
            return self.prefill(q, kv, layer, step, out=out, num_sms=num_sms, sinks=sinks)
        from weft.kernels.attention.pod_hopper import PodWork, launch_pod
        from weft.kernels.attention.pod_together import launch_together

        items, count = step.decodes[None]
        return (launch_together if together else launch_pod)(
            q, kv, layer, step.page_table,
            PodWork(items, count, step.prefill_items, step.prefill_count, step.parts.decoders), out=out,
            num_sms=num_sms or self._num_sms, decodes=step.space, prefills=step.parts.space,
            scale=self._shape.scale, softcap=self._shape.softcap, sinks=sinks,
        )  # fmt: skip
