"""The kernel that attends in an iteration of few tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from weft.kernels.attention import triton_backend as attention_triton
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.triton_backend import FEW_TOKENS, DecodeWork, TritonAttention, TritonStep

SMS = 4


def plain(
    tokens: int, monkeypatch: pytest.MonkeyPatch, *, num_sms: int | None = None, page: int = 64, **options: Any
) -> bool:
    """Whether an iteration of `tokens` tokens runs its decodes in the plain kernel."""
    requested = []
    monkeypatch.setattr(attention_triton, "decode_attention", lambda *_, portable, **__: requested.append(portable))
    shape = AttentionShape(4, 2, 64, page, torch.float16, torch.device("meta"))
    back_end = TritonAttention(shape, SMS, **options)
    nothing: Any = SimpleNamespace()
    step = TritonStep(nothing, {None: DecodeWork(nothing, nothing)}, nothing, nothing, nothing)
    back_end.decode(nothing, nothing, 0, back_end.within(step, tokens), out=nothing, num_sms=num_sms)
    (found,) = requested
    return bool(found)


def test_few_tokens_use_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [plain(tokens, monkeypatch) for tokens in (1, FEW_TOKENS, FEW_TOKENS + 1)] == [True, True, False]


def test_small_pages_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain(1, monkeypatch, page=16)


def test_next_to_gemms_the_kernel_stays_that_of_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain(1, monkeypatch, num_sms=SMS - 1)


def test_batch_invariant_sums_have_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain(1, monkeypatch, batch_invariant=True)
