"""Attention of a hybrid batch in one launch: every program does prefill tiles and decode items at the same time.

See POD-Attention, arXiv 2410.18038; the reference is `reference/layer.py: paged_attention`. In `pod_hopper` an SM does
one or the other, because each uses all of its shared memory and registers. Here both fit: two warpgroups own a tile's
128 rows over blocks of 64 keys, and `CONSUMERS` more warps do one decode item each, over blocks of 32 tokens. Each half
draws from its list until that is empty. A decode warp waits for memory while the tile uses the tensor cores.

The halves come from `decode_hopper` and `prefill_hopper`, but smaller blocks rescale more often, so results differ from
those of `pod_hopper` in the last bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from weft.kernels.attention.decode_hopper import consume_decodes, idle_warps, produce_decodes
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out
from weft.kernels.attention.pod_hopper import (
    Blocks,
    PodWork,
    arguments,
    consume_tiles,
    decode_memory,
    produce_tiles,
    tile_memory,
)
from weft.kernels.attention.prefill_attention import PrefillWorkspace
from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.hopper import follow_previous

CONSUMERS = 3  # Decode items that a program processes at once.
_RING = 98304  # Bytes of shared memory for their K and V.
REGISTERS = (176, 136, 24)
"""Registers per thread of a tile's warpgroup, of a decode warp, and of the producers; multiples of 8."""


@gluon.jit(do_not_specialize=["layer"])
def together_kernel(
    q, queries, decode_kv, prefill_kv, out, out_scale, stride_scale, table, stride_table, decode_items, num_decode,
    decode_partial, decode_arrived, decode_tickets, prefill_items, num_prefill, prefill_partial, prefill_arrived,
    prefill_tickets, layer, layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr,
    DECODE_BN: gl.constexpr, DECODE_BOX: gl.constexpr, SLOTS: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, FIELDS: gl.constexpr,
    R_TILE: gl.constexpr, R_DECODE: gl.constexpr, R_PRODUCE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 3
    (q_smem, k_smem, v_smem, tile_smem, k_full, k_empty, v_full, v_empty, drawn, taken) = tile_memory(
        DTYPE, DP, BN, STAGES
    )
    ring, query_smem, task_smem, tokens_smem, full, empty = decode_memory(DTYPE, DP, GP, DECODE_BN, SLOTS, C)
    fence_async_shared()
    follow_previous(PDL)
    target = (out, out_scale, stride_scale)
    decodes = gl.load(num_decode) * HKV
    tiles = gl.load(num_prefill) * HKV
    source = (queries, decode_kv, query_smem, ring, full, empty, task_smem, tokens_smem, table, stride_table,
              decode_items, decodes, decode_tickets, layer, layers)  # fmt: skip
    sink = (target, query_smem, ring, full, empty, task_smem, tokens_smem, decode_items, decode_partial,
            decode_arrived, scale, sinks)  # fmt: skip
    # Registers are assigned to four warps at a time; the first warpgroup gets the remainder of 512.
    gl.warp_specialize(
        [
            (consume_tiles, (q, target, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_smem, drawn,
                              taken, prefill_items, scale, sinks, prefill_partial, prefill_arrived, 0, HKV, G, BN, BOX,
                              D, DP, STAGES, DTYPE, WINDOW, SOFTCAP, FIELDS)),
            (consume_tiles, (q, target, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_smem, drawn,
                              taken, prefill_items, scale, sinks, prefill_partial, prefill_arrived, 1, HKV, G, BN, BOX,
                              D, DP, STAGES, DTYPE, WINDOW, SOFTCAP, FIELDS)),
            (consume_decodes, (sink, HKV, G, GP, DECODE_BN, DECODE_BOX, D, DP, SLOTS, WINDOW > 0, SOFTCAP, 0)),
            (consume_decodes, (sink, HKV, G, GP, DECODE_BN, DECODE_BOX, D, DP, SLOTS, WINDOW > 0, SOFTCAP, 1)),
            (consume_decodes, (sink, HKV, G, GP, DECODE_BN, DECODE_BOX, D, DP, SLOTS, WINDOW > 0, SOFTCAP, 2)),
            (idle_warps, (False,)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, DECODE_BN, DECODE_BOX, D, DP, SLOTS, True, False, 0)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, DECODE_BN, DECODE_BOX, D, DP, SLOTS, True, False, 1)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, DECODE_BN, DECODE_BOX, D, DP, SLOTS, True, False, 2)),
            (produce_tiles, (prefill_kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_smem, drawn, taken,
                              table, stride_table, prefill_items, tiles, prefill_tickets, layer, layers, HKV, PAGE, BN,
                              BOX, D, DP, STAGES, WINDOW, FIELDS)),
        ],
        [4, 1, 1, 1, 1, 1, 1, 1, 1],
        [R_TILE, R_DECODE, R_DECODE, R_DECODE, R_DECODE, R_PRODUCE, R_PRODUCE, R_PRODUCE, R_PRODUCE],
    )  # fmt: skip


def launch_together(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, work: PodWork, *, out: Out, num_sms: int,
    decodes: DecodeWorkspace, prefills: PrefillWorkspace, scale: float | None = None, window: int | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Like `pod_hopper.launch_pod`, without `work.first_decoders`."""
    width = head_block(kv.shape[5])
    blocks = Blocks(32, _RING // (CONSUMERS * 32 * width * 2), 64, 2)
    given, options = arguments(
        q, kv, layer, page_table, work, out, decodes, prefills, scale, window, softcap, sinks, blocks
    )
    tile, decode, produce = REGISTERS
    together_kernel[(num_sms,)](*given, R_TILE=tile, R_DECODE=decode, R_PRODUCE=produce, **options)
    return out
