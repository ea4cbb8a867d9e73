# seconds 150
# gpus 1
# asks: is it worth asking for weights ahead if whole rows are asked for, not the 32 bytes that a prefetch of one address may be
# A line a way and number of steps in the log: microseconds of one request's layer (2026-11-23: FP8 89.6 with 0 steps ahead and
# 96.5 with 8, each 128 bytes by one prefetch; bf16 126.4). If "bulk" or "sector" with 4 to 16 steps beats 0, `_ahead` and
# `gemm_tiles.prefetch` ask so, and one request gains in both formats. 370 tokens/s in FP8 need about 74 a layer.
for bits in 8 16; do
    for by in bulk sector line; do
        [ $((SECONDS_LEFT - SECONDS)) -lt 15 ] && exit 0
        timeout -k 5 60 python tests/gpu/jobs/few_chain.py --bits $bits --by $by --ahead 0,2,4,8,16
    done
done
