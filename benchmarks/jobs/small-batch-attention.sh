# Question: Which decode-attention kernel adds the least time to a layer with few requests?
# Hardware: 1 GPU
# Time: 90 s
# Run: python benchmarks/jobs/run.py build/jobs --lane small-batch-attention
#     Variables: CHAIN_OPTIONS: options of small_batch_attention.py
# Read: few.txt has one line per format, request count, context and kernel: microseconds of a layer, what attention adds, and
#     attention alone. `FEW_TOKENS` in kernels/attention/triton_backend.py is the largest batch for which the plain Triton kernel wins.
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python benchmarks/jobs/small_batch_attention.py ${CHAIN_OPTIONS:-} 2>&1 | tee "$OUT/few.txt"
