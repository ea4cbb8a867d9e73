# Question: What throughput, single-request speed and start time does a 70B have on several GPUs?
# Hardware: 2 GPUs
# Time: 265 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-throughput
#     Variables: RANKS=2, 4 or 8; MODEL: options of the model (default: a 70B with random weights); MORE: options of the engine,
#     such as --max-num-batched-tokens 4096; WHOLE: the offline workloads; ALONE=no leaves out the single request
# Read: one.json has one request and the phases of a cold start, whole.json the offline workloads and the phases of a warm
#     start, sums-*.json the all-reduce that the start chose.
set -u
export COLUMNS=140
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weft
offline="python -m weft.server bench offline ${MODEL:---model-preset llama-3-70b --load-format dummy}"
offline="$offline --tensor-parallel-size ${RANKS:-2} ${MORE:-}"
alone="--workload 1024:256:1 --trace-iterations 0 --json $OUT/one.json"
if [ "${ALONE:-yes}" = yes ] && ! timeout --foreground -k 5 125 $offline $alone; then
    echo "the start failed while it measured all-reduces: continuing without that measurement"
    offline="$offline --tuning-seconds 0"
    timeout --foreground -k 5 60 $offline $alone
fi
cp "$cache"/sums-*.json "$cache"/gemm-*.json "$OUT"
whole="--workload 1024:512:1000 --then 512:512:1000"
if [ "${RANKS:-2}" = 2 ]; then whole="--workload 1024:512:300 --then 512:512:200"; fi
$offline ${WHOLE:-$whole} --json "$OUT/whole.json"
status=$?
python benchmarks/jobs/rank_rows.py "${RANKS:-2}" "$OUT/whole.json"
exit $status
