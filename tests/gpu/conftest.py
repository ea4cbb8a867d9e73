"""Kernels against their torch references: on a CUDA device, or slowly on the CPU under `TRITON_INTERPRET=1`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from quick_interpreter import make_quick

    make_quick()


@pytest.fixture
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if INTERPRETED:
        return "cpu"
    pytest.skip("needs a CUDA device (or TRITON_INTERPRET=1)")


@pytest.fixture
def num_sms(device: str) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 4


@pytest.fixture
def large(device: str) -> None:
    """For shapes that take the interpreter too long."""
    if device == "cpu":
        pytest.skip("too large for the interpreter")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted numbers become bfloat16 and e4m3 by rounding to the nearest, as on a GPU. The interpreter truncates
    them."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter._convert_float
    eight = torch.float8_e4m3fn

    def convert(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given == tl.float32 and wanted in (tl.float8e4nv, tl.bfloat16):
            x = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            y = x.clamp(-448, 448).to(eight) if wanted == tl.float8e4nv else x.to(torch.bfloat16)
            bits = y.view(torch.uint8 if wanted == tl.float8e4nv else torch.uint16)
            return bits.numpy().reshape(data.shape)
        if given == tl.float8e4nv and wanted in (tl.float16, tl.float32):
            y = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(eight)
            return y.to(torch.float16 if wanted == tl.float16 else torch.float32).numpy().reshape(data.shape)
        return before(data, given, wanted, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
