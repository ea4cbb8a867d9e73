"""Implements a custom attention back end in thirty lines of plain torch.

It gathers each request's pages into dense K and V and calls torch's attention, one request at a time. It is short and
slow: a starting point for another device, or an oracle for a kernel. The example compares it with weft's `torch` back
end, first on random pages, then by serving the demo model.

Run it:  python examples/attention_backend.py

weft has no plug-ins. To add a back end permanently, see docs/adding-a-kernel.md. Here it replaces the reference back
end in this process only.
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


class Share(NamedTuple):
    """One request's share of an iteration."""

    rows: slice
    """Rows of q and out."""
    pages: Tensor
    """Page ids, [pages] int64."""
    visible: int
    """Positions that the last query attends to, including itself."""


class DenseStep(NamedTuple):
    decodes: list[Share]
    chunks: list[Share]


class DenseAttention(HostAttention[DenseStep]):
    """Computes causal attention per request. It plans on the host, so CUDA graphs cannot capture it."""

    captured = False
    calls = 0

    def __init__(self, shape: AttentionShape, *, batch_invariant: bool = False) -> None:  # noqa: ARG002 - always invariant
        self._page_size = shape.page_size

    def prepare(self, requests: AttentionRequests) -> DenseStep:
        """Compute once per iteration everything that depends on lengths, so that the calls per layer need not."""
        ends = np.cumsum(requests.query_len)
        shares = [
            self._share(int(end - n), int(end), int(visible), table)
            for end, n, visible, table in zip(
                ends, requests.query_len, requests.kv_len, requests.page_table, strict=True
            )
        ]
        return DenseStep(shares[: requests.num_decodes], shares[requests.num_decodes :])

    def _share(self, begin: int, end: int, visible: int, table: NDArray[np.int32]) -> Share:
        pages = table[: -(-visible // self._page_size)]  # later pages are reserved for later tokens
        return Share(slice(begin, end), torch.from_numpy(pages.astype(np.int64)), visible)

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: DenseStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - torch decides itself
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
        num_sms: int | None = None,  # noqa: ARG002 - torch decides itself
    ) -> Tensor:
        return self._attend(q, kv, layer, step.chunks, out)

    def _attend(self, q: Tensor, kv: Tensor, layer: int, shares: list[Share], out: Tensor) -> Tensor:
        """q `[T, Hq, D]`, kv `[pages, layers, 2, page_size, Hkv, D]`, out `[T, Hq * D]`."""
        DenseAttention.calls += 1
        for share in shares:
            # [2, visible, Hkv, D]; the end of the last page may hold anything, including NaN
            k, v = kv[share.pages, layer].transpose(0, 1).flatten(1, 2)[:, : share.visible]
            queries = q[share.rows]
            n, m = len(queries), share.visible
            seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)  # the last query sees every position
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
            )
            out[share.rows] = attended.transpose(0, 1).flatten(1)
        return out


class Requests(NamedTuple):
    """An iteration built by hand; in an engine, `Batch` has these fields."""

    num_decodes: int
    query_len: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    page_table: NDArray[np.int32]
    until: NDArray[np.int32] | None = None


def difference_from_reference() -> float:
    """Return the largest difference on random pages: two decodes, and a prefill chunk after 30 cached positions."""
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
    ours, reference = DenseAttention(shape), TorchAttention(shape)
    a = ours.attend(q, kv, 0, ours.prepare(requests), out=torch.zeros(len(q), q[0].numel()))
    b = reference.attend(q, kv, 0, reference.prepare(requests), out=torch.zeros(len(q), q[0].numel()))
    return float((a - b).abs().max())


def answers() -> list[str]:
    questions = ["What is 123 + 456?", "Sort these words: pear apple fig"]
    llm = LLM("demo", device="cpu", dtype="float32", progress=False)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    completions = llm.chat([[{"role": "user", "content": q}] for q in questions], greedy, progress=False)
    llm.close()
    return [completion.text for completion in completions]


def main() -> None:
    difference = difference_from_reference()
    print(f"largest difference from the reference: {difference:.1e}")
    expected = answers()
    DenseAttention.calls = 0
    with mock.patch.object(attention_torch, "TorchAttention", DenseAttention):
        mine = answers()
    print(f"answers: {mine}, {DenseAttention.calls} calls")
    if difference > 1e-5 or mine != expected or not DenseAttention.calls:
        raise SystemExit(f"answers differ from the reference: {expected}")


if __name__ == "__main__":
    main()
