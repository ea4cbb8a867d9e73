# Question: What does a layer cost with one to 16 requests, by the way its GEMMs run?
# Hardware: 1 GPU
# Time: 70 s
# Run: python benchmarks/jobs/run.py build/jobs --lane small-batch-gemms
#     Variables: CHAIN_OPTIONS: options of small_batch_gemms.py
# Read: log.txt has one line per way and token count: microseconds of a layer with attention over 1,280 tokens, without it, and
#     of each GEMM alone. The weights of a layer of an 8B in FP8 take 50 us to read.
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python benchmarks/jobs/small_batch_gemms.py ${CHAIN_OPTIONS:-}
