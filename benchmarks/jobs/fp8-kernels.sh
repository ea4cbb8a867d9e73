# Question: How fast and how exact are the FP8 kernels compared with torch and float32?
# Hardware: 1 GPU
# Time: 130 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-kernels
#     Variables: KERNELS: kernels to measure alone; ARGMAX_OPTIONS: options of tests/gpu/fp8_argmax.py
# Read: kernels.json has GEMMs compared with `torch._scaled_mm`, the errors of their sums, decode attention over FP8 pages (4.0
#     TB/s is the aim) and the unpacking of pages for prefill. argmax.json has the share of positions that keep float32's best token.
timeout -k 5 80 python -m weft.server bench kernels --seconds 1.6 --only "${KERNELS:-fp8-sums,fp8-decode,fp8-prefill,fp8-gemm}" \
    --json "$OUT/kernels.json"
[ -z "$KERNELS" ] || exit 0 # only those kernels
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) env PYTHONPATH="tests/gpu:$PYTHONPATH" python tests/gpu/fp8_argmax.py --json "$OUT/argmax.json" \
    ${ARGMAX_OPTIONS:-}
