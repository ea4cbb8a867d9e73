# seconds 130
# gpus 1
# asks: FP8 products beside torch's, what their sums lose, attention over FP8 pages, best tokens beside float32's
# Answers: kernels.json: products with epilogues >= 95 % of `torch._scaled_mm` by rows at 2,048 tokens (0.81 to 0.89 on
# 2026-11-23; rows of 16 to 512 tokens are new), errors of sums no larger than `_scaled_mm`'s without fast accumulation
# (`fp8-sums`), decode over FP8 pages >= 4.0 TB/s, pages put into 16 bits for prefill (the pass that serves was never
# timed): "FP8 products", "Decode attention over FP8 pages" and the prefill table of "FP8 end to end" in BENCHMARKS.md.
# argmax.json: the share of positions whose best token is float32's, >= 99 % asked for (weights are made up as trained
# ones are, and 16 bits stand beside it), for "FP8 end to end".
# Behind fp8-e2e on the same machine products run with the tiles that its start found, else by rule.
timeout -k 5 80 python -m weft.server bench kernels --seconds 1.6 --only "${KERNELS:-fp8-sums,fp8-decode,fp8-prefill,fp8-gemm}" \
    --json "$OUT/kernels.json"
[ -z "$KERNELS" ] || exit 0 # those alone
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) env PYTHONPATH="tests/gpu:$PYTHONPATH" python tests/gpu/fp8_argmax.py --json "$OUT/argmax.json" \
    ${ARGMAX_OPTIONS:-}
