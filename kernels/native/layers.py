"""`Step` and `Iteration`: operations of layers for the C++ code, and the inputs of one iteration (layers.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.native import library
from weft.kernels.native.products import CPacked

KINDS = {"qkv": 0, "decode": 1, "residual": 2, "gate_up": 3}
BUFFERS = {"x": 0, "q": 1, "a": 2, "h": 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
HEAD_DIMS, MAX_GROUP = range(16, 257, 16), 16  # Head sizes and query heads per KV head that attention supports.
DTYPES = (torch.float32, torch.bfloat16)


class CPages(ctypes.Structure):
    """`Pages` of attention.h."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("layers", ctypes.c_int64), ("page_size", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64), ("head_dim", ctypes.c_int64), ("brain", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    def of(cls, kv: Tensor) -> CPages:
        """kv: `[pages, layers, 2, page_size, Hkv, D]`."""
        _, layers, _, page_size, kv_heads, head_dim = kv.shape
        return cls(kv.data_ptr(), layers, page_size, kv_heads, head_dim, kv.dtype == torch.bfloat16)


class CDecodes(ctypes.Structure):
    """`Decodes` of attention.h. Keeps the arrays that it points to."""

    _fields_ = (
        ("page_table", ctypes.c_void_p), ("kv_len", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, page_table: NDArray[np.int32], kv_len: NDArray[np.int32]) -> CDecodes:
        """page_table `[R, P]`, kv_len `[R]`: of requests with one query."""
        table = np.ascontiguousarray(page_table, np.int32)
        lengths = np.ascontiguousarray(kv_len, np.int32)
        made = cls(table.ctypes.data, lengths.ctypes.data, len(table), table.shape[1])
        made.arrays = table, lengths
        return made


class CScores(ctypes.Structure):
    """`Scores` of attention.h. Keeps the tensor that it points to."""

    _fields_ = (
        ("window", ctypes.c_int64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("sinks", ctypes.c_void_p)
    )  # fmt: skip

    @classmethod
    def of(cls, window: int | None, scale: float, softcap: float, sinks: Tensor | None) -> CScores:
        own = None if sinks is None else sinks.float().contiguous()
        made = cls(window or 0, scale, softcap, None if own is None else own.data_ptr())
        made.own = own
        return made


class CStep(ctypes.Structure):
    """`Step` of layers.h."""

    _fields_ = (
        ("kind", ctypes.c_int32), ("activation", ctypes.c_int32), ("rotary", ctypes.c_int32),
        ("normed", ctypes.c_int32), ("w", CPacked), ("norm", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p), ("post_norm", ctypes.c_void_p),
        ("layer", ctypes.c_int64), ("heads", ctypes.c_int64), ("input", ctypes.c_int64), ("output", ctypes.c_int64),
        ("scores", CScores), ("eps", ctypes.c_float),
    )  # fmt: skip


class CIteration(ctypes.Structure):
    """`Iteration` of layers.h."""

    _fields_ = (
        ("buffers", ctypes.c_void_p * len(BUFFERS)), ("sumsq", ctypes.c_void_p), ("rotary", ctypes.c_void_p),
        ("slots", ctypes.c_void_p), ("kv", CPages), ("decodes", CDecodes), ("tokens", ctypes.c_int64),
        ("brain", ctypes.c_int32), ("threads", ctypes.c_int32),
    )  # fmt: skip


class Steps:
    """Operations in order. `kept`: tensors that they point to."""

    def __init__(self, steps: Sequence[CStep], kept: Sequence[Tensor]) -> None:
        self._array = (CStep * len(steps))(*steps)
        self._kept = kept

    def run(self, begin: int, end: int, iteration: CIteration) -> None:
        """Run the steps begin..end. Raises `MemoryError`."""
        native = library.loaded()
        assert native is not None
        first = ctypes.byref(self._array, begin * ctypes.sizeof(CStep))
        if native.weft_run(first, ctypes.c_int64(end - begin), ctypes.byref(iteration)):
            raise MemoryError("no memory for the activations of an iteration")


def iteration_of(
    buffers: Mapping[str, Tensor], sumsq: Tensor, rotary: Sequence[Tensor], slots: Tensor, kv: CPages,
    decodes: CDecodes,
) -> CIteration:  # fmt: skip
    """Return an iteration over T tokens. buffers: contiguous activations `[T, ...]` of one dtype; sumsq `[T]` float32;
    rotary: tables `[T, D/2, 2]` float32; slots `[T]` int64. The caller keeps them."""
    x = buffers["x"]
    pointers = (ctypes.c_void_p * len(BUFFERS))(*(buffers[name].data_ptr() for name in BUFFERS))
    tables = (ctypes.c_void_p * len(rotary))(*(table.data_ptr() for table in rotary))
    made = CIteration(
        pointers, sumsq.data_ptr(), ctypes.addressof(tables), slots.data_ptr(), kv, decodes, len(x),
        x.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    made.tables = tables
    return made


def row_squares(x: Tensor) -> Tensor:
    """Return `[T]` float32: sums of squares of the rows of x `[T, H]`, each independent of the other rows."""
    native = library.loaded()
    assert native is not None
    sums = torch.empty(len(x))
    native.weft_row_squares(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), ctypes.c_int64(x.shape[1]),
        x.dtype == torch.bfloat16, ctypes.c_void_p(sums.data_ptr()),
    )  # fmt: skip
    return sums


def decode_attention(
    q: Tensor, kv: CPages, layer: int, decodes: CDecodes, scores: CScores, out: Tensor
) -> None:  # fmt: skip
    """Attention of requests with one query. q `[R, Hq, D]`, out `[R, Hq * D]`: contiguous, in the pages' dtype."""
    native = library.loaded()
    assert native is not None
    if native.weft_decode(
        ctypes.byref(kv), ctypes.c_int64(layer), ctypes.byref(decodes), ctypes.byref(scores),
        ctypes.c_int64(q.shape[1]), ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    ):  # fmt: skip
        raise ValueError(f"no attention with heads of {q.shape[-1]}")
