# Question: How does the time of a 70B's layer grow with the tokens of an iteration?
# Hardware: 2 GPUs
# Time: 330 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-batch-sizes
#     Variables: RANKS=2
# Read: layers.json has microseconds of a layer without sums and with GEMMs that push, for 576 to 4,096 tokens. whole.json has a
#     whole run with the milliseconds of its iterations by their tokens.
set -u
export COLUMNS=140
model="--model-preset llama-3-70b --tensor-parallel-size ${RANKS:-2}"
python -m weft.server bench ranks $model --rounds 1 --seconds 1.2 --ways none,sent-two \
    --tokens 576 640 704 768 896 1024 2048 3072 4096 --json "$OUT/layers.json"
if [ $((SECONDS + 180)) -lt "$SECONDS_LEFT" ]; then
    count=300
    if [ "${RANKS:-2}" -gt 2 ]; then count=1000; fi
    python -m weft.server bench offline $model --load-format dummy --workload 1024:512:$count --json "$OUT/whole.json"
fi
