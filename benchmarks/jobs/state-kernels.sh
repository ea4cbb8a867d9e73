# Question: Are the kernels of recurrent states and latents exact, and how close are they to their bounds?
# Hardware: 1 GPU
# Time: 300 s
# Run: python benchmarks/jobs/run.py build/jobs --lane state-kernels
#     Variables: STATE_OPTIONS: options of bench_states and bench_latent, e.g. --sweep
# Read: tests.txt must pass. states.json has for each model the errors of a step and of a chunk (bfloat16: below 0.05), then a
#     row for each size: "us" of a layer, "bound_us" is its least traffic at the speed of a copy, "*_us" are its launches alone.
#     A step of 64 requests should reach 0.75 of the bound. latent.json has DeepSeek's decode attention: with 128 heads it should
#     reach 0.6 of a copy or of GEMMs, with 16 heads 0.75 of a copy.
timeout -k 5 120 python -m pytest -q -p no:cacheprovider tests/gpu/test_states.py tests/gpu/test_latent.py > "$OUT/tests.txt" 2>&1
echo "tests: exit status $?"
tail -3 "$OUT/tests.txt"
timeout -k 5 $(((SECONDS_LEFT - SECONDS) * 2 / 3)) python -m weft.tools.kernels.bench_states --json "$OUT/states.json" \
    ${STATE_OPTIONS:-}
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python -m weft.tools.kernels.bench_latent --json "$OUT/latent.json" ${STATE_OPTIONS:-}
