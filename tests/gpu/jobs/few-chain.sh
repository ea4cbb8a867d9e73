# seconds 70
# gpus 1
# asks: what are layers of one request, and of a few, worth whose weights arrive while the kernel before ends
# A line a way and count of tokens in the log: microseconds of a layer in FP8, with attention over 1,280 tokens and without,
# and of each product alone (2026-11-24: 82 with attention, plain 90; 50 are bytes). 370 tokens/s need about 75.
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python tests/gpu/jobs/few_chain.py ${CHAIN_OPTIONS:-}
