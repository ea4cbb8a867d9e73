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

    Work lists and page tables are older than that kernel, so they may be read before this call."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_with_previous():
    """Like `dependent_launch.begin_with_previous`."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def skip_stages(full, empty, count, steps, STAGES: gl.constexpr):
    """Release the stages of a tile if all its rows belong to the other warpgroup. Returns the advanced count."""
    for _ in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def follow_previous(PDL: gl.constexpr):
    """Wait for the previous kernel, then allow the next one to start, if launches overlap."""
    if PDL:
        await_previous()
        let_next_start()


@gluon.jit
def live_tokens(num_tokens, M, HAS_COUNT: gl.constexpr):
    """Like `gemm_tiles.live_tokens`."""
    live = M
    if HAS_COUNT:
        live = gl.minimum(gl.load(num_tokens), M)
    return live


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return a ring's barriers: `full`, at which the producer arrives, and `empty`, at which each reader arrives."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def load_operands(
    a, w, row, col, step, a_smem, w_smem, full, empty, count, BK: gl.constexpr, BYTES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Request one step of both operands when its stage is free. Returns the advanced count."""
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    load_tile(a, [row, step * BK], full.index(stage), a_smem.index(stage))
    load_tile(w, [col, step * BK], full.index(stage), w_smem.index(stage))
    return count + 1
