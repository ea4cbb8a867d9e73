"""Dependent launch: a kernel may start while the one before it on its stream still runs.

Kernels launched with `pdl_options` call `begin` before they touch what the kernel before them wrote.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl

from weft.kernels.common.gpu import gpu

_dependent = True


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait until the kernel before this one has finished and its results are visible (dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start, as far as there is room, and prefetch; its own `begin` waits for this one's end.

    Early release is not better: what the next kernel prefetches would be evicted before it is read.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@contextmanager
def dependent_launch(allowed: bool) -> Iterator[None]:
    """Launches inside start early behind the kernel before them on their stream, or, if not `allowed`, do not."""
    global _dependent
    before, _dependent = _dependent, allowed
    try:
        yield
    finally:
        _dependent = before


def pdl_options() -> dict[str, bool]:
    """Launch options of dependent launch, where the GPU has it. Kernels launched so must call `begin` first of all."""
    here = gpu()
    early = _dependent and here is not None and here.capability[0] >= 9
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
