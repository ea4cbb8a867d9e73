"""Kernels against their torch twins: on a CUDA device, or slowly on the CPU under `TRITON_INTERPRET=1`."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
    """For shapes that the interpreter would not finish."""
    if device == "cpu":
        pytest.skip("too large for the interpreter")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)
