"""A small kernel that checks whether Triton compiles and runs on this GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add_one(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


def probe(device: int = 0) -> bool:
    """Return whether the kernel's result is correct. Exceptions of Triton and the driver pass through."""
    with torch.cuda.device(device):
        x = torch.arange(SIZE, dtype=torch.float32, device="cuda")
        y = torch.empty_like(x)
        _add_one[(SIZE // 128,)](x, y, SIZE, BLOCK=128)
        return bool(torch.equal(y, x + 1))
