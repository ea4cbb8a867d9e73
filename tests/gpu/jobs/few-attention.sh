# seconds 90
# gpus 1
# asks: which kernel attends for one request and a few with the least time behind their products
# few.txt: a line a format, count of requests, context and kernel: microseconds of a layer, what attention adds to it, and
#   attention alone. Plain Triton has up to 32 tokens in 16 bits (`attention_triton.FEW_TOKENS`; 2026-11-24: by 4 to 7 us of
#   32 requests, by at most 2 of 64 and 128); in 8 bits it has none. A change to either kernel asks for another look.
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python tests/gpu/jobs/few_attention.py ${CHAIN_OPTIONS:-} 2>&1 | tee "$OUT/few.txt"
