"""Dependent launch: a kernel may start while the previous kernel on its stream still runs.

Kernels launched with `pdl_options` call `begin` before they touch data that the previous kernel wrote.
"""

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
    """Wait until the previous kernel has finished and its results are visible (dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_with_previous(PDL: tl.constexpr):
    """In place of `begin`, which then comes later: the previous kernel is released only after its own `begin`, so all
    older kernels have ended. The fence drops what this SM's L1 cache has of their data."""
    if PDL:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start and prefetch as far as resources allow; its `begin` still waits for this kernel's end.

    An earlier release is not better: data that the next kernel prefetches would be evicted before it is read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@contextmanager
def dependent_launch(allowed: bool) -> Iterator[None]:
    """Let launches inside start before the previous kernel on their stream ends, or forbid it if not `allowed`."""
    global _dependent
    before, _dependent = _dependent, allowed
    try:
        yield
    finally:
        _dependent = before


def pdl_options() -> dict[str, bool]:
    """Return the options of dependent launch, if the GPU supports it. Kernels launched with them must call `begin`."""
    here = gpu()
    early = _dependent and here is not None and here.capability[0] >= 9
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
