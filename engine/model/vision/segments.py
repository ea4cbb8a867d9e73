"""`attend_in_segments`: the attention of a tower whose patches see only their window, in one launch on a GPU.

`transformers` calls its attention once per window unless it finds a flash attention. A tower with a hundred windows
then needs thousands of launches for an image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "weft_flash_segments"
"""`transformers` passes segments to any attention whose name contains "flash"."""
HEAD_STEP = 8  # head sizes are multiples of this


def attend_in_segments(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: Any, max_length_k: Any, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return `[1, T, heads, D]`. query, key, value: `[1, heads, T, D]`; cu_seq_lens: where segments begin and end."""
    assert attention_mask is None
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), int(max_length_q), int(max_length_k), 0.0, False, False,
        scale=scaling,
    )[0]  # fmt: skip
    return out[None], None


def use_segments(tower: Any) -> None:
    """Let a tower on a GPU use this attention, if its heads allow that."""
    config = tower.config
    if config.hidden_size // config.num_heads % HEAD_STEP == 0:
        AttentionInterface.register(NAME, attend_in_segments)
        config._attn_implementation = NAME
