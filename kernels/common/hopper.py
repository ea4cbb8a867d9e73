"""Gluon helpers shared by the Hopper kernels: TMA copies, barriers and dependent launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton renamed these after 3.6.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def let_next_start():
    """Allow the next kernel on the stream to start, so that it can fetch its weights while memory is idle."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.jit
def await_previous():
    """Wait until the results of the previous kernel are visible.

    Work lists and page tables are older than that kernel, so they may be read before this call.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def skip_stages(full, empty, count, steps, STAGES: gl.constexpr):
    """Release the stages of a tile whose rows all belong to the other warpgroup. Returns the advanced count."""
    for _ in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return count
