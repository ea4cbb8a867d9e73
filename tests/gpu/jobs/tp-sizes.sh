# seconds 330
# gpus 2
# asks: where a 70B's run loses what its fullest iterations reach: 80 % of Equation 5's optimum in those of 2,048 tokens
#   on four, 74 % whole. Total tokens/s of 1024/512 x 1000 (x 300 on two) with milliseconds of iterations by their tokens
#   -> whole.json; microseconds of a layer by tokens, without sums and with each way of ours -> sizes.json. Sizes whose
#   tokens cost more than those of the sizes around them want tiles, a graph or a way to make sums of their own. Before
#   that: whether a batch-invariant pipeline gives the serial plan's bits.
#   RANKS: on so many GPUs instead of two.
set -u
export COLUMNS=140
python -m pytest -q -s --durations=0 -p no:cacheprovider -o timeout=120 -k "batch_invariant_pipeline and not 2_ranks" \
    tests/gpu/test_executor.py tests/gpu/test_ranks.py
model="--model-preset llama-3-70b --tensor-parallel-size ${RANKS:-2}"
count=300
if [ "${RANKS:-2}" = 4 ]; then count=1000; fi
python -m weft.server bench offline $model --load-format dummy --workload 1024:512:$count --json "$OUT/whole.json"
python -m weft.server bench ranks $model --rounds 1 --seconds 1 --ways none,one,two,sent-two --json "$OUT/sizes.json" \
    --tokens 32 64 128 192 256 320 384 448 512 576 640 704 768 1024 1536
