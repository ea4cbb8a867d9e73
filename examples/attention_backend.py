"""An attention back end of one's own: what the interface asks for, on thirty lines of plain torch.

It gathers each request's pages into dense K and V and calls torch's attention, one request after another. It is slow
and short: a start for another device, or an oracle for a kernel. It is held against the back end that weft has
(`torch`), first on random pages, then by serving the demo model.

Run it:  python examples/attention_backend.py

weft has no plug-ins. A back end that stays gets a name; docs/adding-a-kernel.md says where, and what else a kernel
brings. Here it takes the twin's place, in this process only.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft import LLM, SamplingParams
from weft.kernels.attention import torch_backend as attention_torch
from weft.kernels.attention.backend import AttentionRequests, AttentionShape, HostAttention
from weft.kernels.attention.torch_backend import TorchAttention


class Part(NamedTuple):
    """One request's share of an iteration."""

    rows: slice
    """of q and out"""
    pages: Tensor
    """[pages] int64"""
    visible: int
    """positions that its last query sees, its own included"""


class DenseStep(NamedTuple):
    decodes: list[Part]
    chunks: list[Part]


class DenseAttention(HostAttention[DenseStep]):
    """Causal attention, request by request. Plans on the host, so it is not captured in a CUDA graph."""

    captured = False
    calls = 0

    def __init__(self, shape: AttentionShape, *, batch_invariant: bool = False) -> None:  # noqa: ARG002 - it always is
        self._page_size = shape.page_size

    def prepare(self, requests: AttentionRequests) -> DenseStep:
        """Once an iteration: whatever depends on lengths, so that the calls for each layer need not look at them."""
        ends = np.cumsum(requests.query_len)
        parts = [
            self._part(int(end - n), int(end), int(visible), table)
            for end, n, visible, table in zip(
                ends, requests.query_len, requests.kv_len, requests.page_table, strict=True
            )
        ]
        return DenseStep(parts[: requests.num_decodes], parts[requests.num_decodes :])

    def _part(self, begin: int, end: int, visible: int, table: NDArray[np.int32]) -> Part:
        pages = table[: -(-visible // self._page_size)]  # those behind it are reserved for later tokens
        return Part(slice(begin, end), torch.from_numpy(pages.astype(np.int64)), visible)

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: DenseStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - torch takes what it wants
    ) -> Tensor:
        return self._attend(q, kv, layer, step.decodes, out)

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: DenseStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - torch takes what it wants
    ) -> Tensor:
        return self._attend(q, kv, layer, step.chunks, out)

    def _attend(self, q: Tensor, kv: Tensor, layer: int, parts: list[Part], out: Tensor) -> Tensor:
        """q `[T, Hq, D]`, kv `[pages, layers, 2, page_size, Hkv, D]`, out `[T, Hq * D]`."""
        DenseAttention.calls += 1
        for part in parts:
            # [2, visible, Hkv, D]; whatever lies behind in the last page may be anything, NaN included
            k, v = kv[part.pages, layer].transpose(0, 1).flatten(1, 2)[:, : part.visible]
            queries = q[part.rows]
            n, m = len(queries), part.visible
            seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)  # the last query sees all
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
            )
            out[part.rows] = attended.transpose(0, 1).flatten(1)
        return out


class Requests(NamedTuple):
    """An iteration made by hand; in an engine this is its `Batch`."""

    num_decodes: int
    query_len: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    page_table: NDArray[np.int32]


def difference_from_twin() -> float:
    """The largest difference on random pages: two decodes and a prefill chunk behind 30 cached positions."""
    shape = AttentionShape(
        num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    requests = Requests(
        num_decodes=2,
        query_len=np.array([1, 1, 12], np.int32),
        kv_len=np.array([5, 33, 42], np.int32),
        page_table=np.array([[7, 0, 0], [3, 1, 9], [4, 8, 2]], np.int32),
    )
    torch.manual_seed(0)
    kv = torch.randn(10, 1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    q = torch.randn(int(requests.query_len.sum()), shape.num_heads, shape.head_dim)
    ours, twin = DenseAttention(shape), TorchAttention(shape)
    a = ours.attend(q, kv, 0, ours.prepare(requests), out=torch.zeros(len(q), q[0].numel()))
    b = twin.attend(q, kv, 0, twin.prepare(requests), out=torch.zeros(len(q), q[0].numel()))
    return float((a - b).abs().max())


def answers() -> list[str]:
    questions = ["What is 123 + 456?", "Sort these words: pear apple fig"]
    llm = LLM("demo", device="cpu", dtype="float32", progress=False)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    completions = llm.chat([[{"role": "user", "content": q}] for q in questions], greedy, progress=False)
    llm.close()
    return [completion.text for completion in completions]


def main() -> None:
    difference = difference_from_twin()
    print(f"largest difference from the twin: {difference:.1e}")
    expected = answers()
    DenseAttention.calls = 0
    with mock.patch.object(attention_torch, "TorchAttention", DenseAttention):
        mine = answers()
    print(f"answers: {mine}, {DenseAttention.calls} calls")
    if difference > 1e-5 or mine != expected or not DenseAttention.calls:
        raise SystemExit(f"not the twin's answers: {expected}")


if __name__ == "__main__":
    main()
