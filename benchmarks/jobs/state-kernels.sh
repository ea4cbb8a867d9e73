# Question: Are the kernels of recurrent states exact, and how close are they to the memory bound?
# Hardware: 1 GPU
# Time: 240 s
# Run: python benchmarks/jobs/run.py build/jobs --lane state-kernels
#     Variables: STATE_OPTIONS: options of bench_states, e.g. "--sweep --models Qwen3.5-27B"
# Read: tests.txt must pass. states.json has for each model the errors of a step and of a chunk (bfloat16: below 0.05), then a
#     row for each size: "us" of a layer, "bound_us" is its least traffic at the speed of a copy, "*_us" are its launches alone.
#     A step of 64 requests should reach 0.75 of the bound.
timeout -k 5 100 python -m pytest -q -p no:cacheprovider tests/gpu/test_states.py > "$OUT/tests.txt" 2>&1
echo "tests: exit status $?"
tail -3 "$OUT/tests.txt"
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python -m weft.tools.kernels.bench_states --json "$OUT/states.json" ${STATE_OPTIONS:-}
