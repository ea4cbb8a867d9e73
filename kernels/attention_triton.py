"""The `triton` attention back end: our kernels, over work lists in device memory. May be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from weft.kernels.attention import AttentionBackend, AttentionShape
from weft.kernels.attention_backends import check
from weft.kernels.decode_attention import decode_attention
from weft.kernels.decode_workspace import DecodeWorkspace
from weft.kernels.prefill_attention import prefill_attention

PER_SM = 4
"""programs of decode attention on each SM"""


class DecodeWork(NamedTuple):
    """Of the layers with one window."""

    items: Tensor
    """[max_items, ITEM_FIELDS] int32"""
    number: Tensor
    """[1] int32"""


class TritonStep(NamedTuple):
    """Where the work of one nano-batch lies on the device. The tensors stay put; their owner fills the lists once an
    iteration with `decode_items` and `prefill_items`.
    """

    page_table: Tensor
    """[rows, max_pages] int32"""
    decodes: Mapping[int | None, DecodeWork]
    """by window"""
    prefill_items: Tensor
    """[max_items, TILE_FIELDS] int32"""
    prefill_count: Tensor
    """[1] int32"""
    space: DecodeWorkspace
    """of no other step whose launches may run at the same time"""


class TritonAttention(AttentionBackend[TritonStep]):
    """See `attention.AttentionBackend`. Raises `AttentionUnavailable` for a shape that the kernels do not take.

    num_sms: SMs of the GPU. `decode_items` cuts the work for `num_sms * PER_SM` programs.
    """

    captured = True

    def __init__(self, shape: AttentionShape, num_sms: int) -> None:
        check("triton", shape)
        self._shape, self._num_sms = shape, num_sms

    def decode(
        self, q: Tensor, kv: Tensor, layer: int, step: TritonStep, *, out: Tensor, num_sms: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shape, window = self._shape, self._shape.window(layer)
        items, count = step.decodes[window]
        return decode_attention(
            q, kv, layer, step.page_table, items, count, out=out, num_sms=num_sms or self._num_sms, space=step.space,
            per_sm=PER_SM, scale=shape.scale, windowed=window is not None, softcap=shape.softcap, sinks=sinks,
        )  # fmt: skip

    def prefill(
        self, q: Tensor, kv: Tensor, layer: int, step: TritonStep, *, out: Tensor, num_sms: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shape = self._shape
        return prefill_attention(
            q, kv, layer, step.page_table, step.prefill_items, step.prefill_count, out=out,
            num_sms=num_sms or self._num_sms, scale=shape.scale, window=shape.window(layer), softcap=shape.softcap,
            sinks=sinks,
        )  # fmt: skip
