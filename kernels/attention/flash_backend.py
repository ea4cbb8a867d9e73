"""The `flash-attn` attention backend: that package over weft's pages. Never captured in a CUDA graph.

FlashAttention-2 (`flash_attn`) serves GPUs from Ampere on, with page sizes that are multiples of 256 tokens.
FlashAttention-3 (`flash_attn_interface`) is used if it is installed and the GPU is a Hopper; it accepts any page size.
Both read a layer of a page by stride: only rows of `head_dim` must be contiguous.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft import install_hint
from weft.kernels.attention.backend import AttentionRequests, AttentionShape, AttentionUnavailable, HostAttention

PAGE_STEP = 256  # FlashAttention-2 needs page sizes that are multiples of this.
MAX_HEAD_DIM = 256


class FlashStep(NamedTuple):
    """One iteration: d decodes, then the prefill chunks. Device tensors are int32."""

    num_decodes: int
    num_tokens: int
    page_table: Tensor  # [R, P]
    kv_len: Tensor  # [R]
    cu_queries: Tensor  # [R - d + 1]: where each chunk's queries begin, counted from the first chunk.
    cu_keys: Tensor  # [R - d + 1]: where each chunk's visible positions begin.
    max_queries: int
    max_keys: int  # Maximum over the chunks.


def _has_version_3(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("flash_attn_interface") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def check_flash(shape: AttentionShape) -> int:
    """Return the FlashAttention version that serves `shape`, 2 or 3. Raises `AttentionUnavailable`."""
    version = 3 if _has_version_3(shape.device) else 2
    if version == 2 and importlib.util.find_spec("flash_attn") is None:
        raise AttentionUnavailable(
            f"the package flash-attn is not installed: {install_hint('flash-attn')}, or use triton"
        )
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise AttentionUnavailable(f"flash-attn supports bfloat16 or float16, not {shape.dtype}; use torch")
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 8:
        raise AttentionUnavailable(
            f"flash-attn supports a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, "
            f"the model has {shape.head_dim}; use torch"
        )
    if version == 2 and shape.page_size % PAGE_STEP:
        raise AttentionUnavailable(
            f"flash-attn 2 supports pages of a multiple of {PAGE_STEP} tokens, not {shape.page_size}: "
            f"set the page size to {PAGE_STEP}, or use triton"
        )
    return version


class FlashAttention(HostAttention[FlashStep]):
    """See `backend.HostAttention`. Raises `AttentionUnavailable`.

    batch_invariant: never split a request's keys over programs; decodes of few long requests become slower."""

    captured = False

    def __init__(self, shape: AttentionShape, *, batch_invariant: bool = False) -> None:
        self.version = check_flash(shape)
        module: Any = importlib.import_module("flash_attn_interface" if self.version == 3 else "flash_attn")
        self._varlen, self._with_kvcache = module.flash_attn_varlen_func, module.flash_attn_with_kvcache
        self._splits = 1 if batch_invariant else 0  # 0: the package's own choice
        self._device = shape.device

    def prepare(self, requests: AttentionRequests) -> FlashStep:
        d, rows = requests.num_decodes, len(requests.query_len)
        queries, keys = requests.query_len[d:], requests.kv_len[d:]
        starts = np.zeros((2, rows - d + 1), np.int32)
        np.cumsum(queries, out=starts[0, 1:])
        np.cumsum(keys, out=starts[1, 1:])
        # One transfer of everything.
        words = np.concatenate((requests.page_table.reshape(-1), requests.kv_len, starts.reshape(-1)), dtype=np.int32)
        host = torch.from_numpy(words)
        if self._device.type == "cuda":
            host = host.pin_memory()
        there = host.to(self._device, non_blocking=True)
        table, kv_len, cu_queries, cu_keys = there.split((requests.page_table.size, rows, rows - d + 1, rows - d + 1))
        return FlashStep(
            d,
            int(requests.query_len.sum()),
            table.view(rows, -1),
            kv_len,
            cu_queries,
            cu_keys,
            int(queries.max(initial=0)),
            int(keys.max(initial=0)),
        )

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: FlashStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - the package has no such option
    ) -> Tensor:
        d = step.num_decodes
        if d:
            table = {"page_table" if self.version == 3 else "block_table": step.page_table[:d]}
            attended = self._with_kvcache(
                q[:d, None],
                kv[:, layer, 0],
                kv[:, layer, 1],
                cache_seqlens=step.kv_len[:d],
                causal=True,
                num_splits=self._splits,
                **table,
            )
            out.view(q.shape)[:d] = attended[:, 0]
        return out

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: FlashStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002
    ) -> Tensor:
        d, t = step.num_decodes, step.num_tokens
        if t == d:
            return out
        k, v = kv[:, layer, 0], kv[:, layer, 1]  # [pages, page_size, Hkv, D], strided
        if self.version == 3:
            attended = self._with_kvcache(
                q[d:t],
                k,
                v,
                cache_seqlens=step.kv_len[d:],
                page_table=step.page_table[d:],
                cu_seqlens_q=step.cu_queries,
                max_seqlen_q=step.max_queries,
                causal=True,
                num_splits=self._splits,
            )
        else:
            attended = self._varlen(
                q[d:t],
                k,
                v,
                cu_seqlens_q=step.cu_queries,
                cu_seqlens_k=step.cu_keys,
                max_seqlen_q=step.max_queries,
                max_seqlen_k=step.max_keys,
                causal=True,
                block_table=step.page_table[d:],
            )
        out.view(q.shape)[d:t] = attended
        return out
