# seconds 90
# gpus 1
# asks: which kernel attends for one request and a few with the least time behind their products
# few.txt: a line a format, count of requests, context and kernel: microseconds of a layer, what attention adds to it, and
#   attention alone. 12 us in either format on 2026-11-24 (one request, 1,280 tokens).
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python tests/gpu/jobs/few_attention.py ${CHAIN_OPTIONS:-} 2>&1 | tee "$OUT/few.txt"
