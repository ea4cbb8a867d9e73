# seconds 90
# gpus 1
# asks: which kernel attends for one request and a few with the least time behind their products
# few.txt: a line a format, count of requests, context and kernel: microseconds of a layer, what attention adds to it, and
#   attention alone. Up to 16 tokens in 16 bits it was plain Triton (2026-11-24, by 2 to 6 us), so an engine has it there
#   (`attention_triton.FEW_TOKENS`). Where plain adds less at 32 to 128 tokens too, at both lengths, raise that.
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python tests/gpu/jobs/few_attention.py ${CHAIN_OPTIONS:-} 2>&1 | tee "$OUT/few.txt"
