# Question: What does each way to all-reduce cost in a layer of a 70B?
# Hardware: 2 GPUs
# Time: 200 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-allreduce
#     Variables: RANKS=2; MODEL: options of the model (default: --model-preset llama-3-70b); ROUNDS=2; ROUND_SECONDS=2.5
# Read: ranks.json has, for 2,048, 512 and 64 tokens, microseconds of a layer and of its sums, tokens/s, watts and clocks: no
#     sums, ours in one and two steps, GEMMs that push partial sums, NCCL, and two nano-batches. Run it after tp-throughput
#     to reuse its kernels.
set -u
export COLUMNS=140
ranks="python -m weft.server bench ranks ${MODEL:---model-preset llama-3-70b} --tensor-parallel-size ${RANKS:-2} --tuning-seconds 30"
ranks="$ranks --seconds ${ROUND_SECONDS:-2.5} --rounds ${ROUNDS:-2} --trace $OUT/ranks.trace.json.gz"
timeout --foreground -k 5 $((SECONDS_LEFT * 7 / 10)) $ranks --tokens 2048 512 64 --json "$OUT/ranks.json" \
    --ways none,one,two,sent-one,sent-two,vendor,nano,sent-nano
status=$?
if [ ! -f "$OUT/ranks.json" ]; then # no size was measured: leave NCCL out
    $ranks --tokens 2048 --rounds 1 --json "$OUT/ranks.json" --ways none,one,two,sent-one,sent-two,nano,sent-nano
fi
exit $status
