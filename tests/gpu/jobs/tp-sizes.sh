# seconds 330
# gpus 2
# asks: first whether a batch-invariant pipeline gives the serial plan's bits, on one GPU and on ranks, and whether neighbours
#   change any. Then what tiles by rule change at 513 to 1,024 tokens (`mid_rule.PROMISE`): microseconds of a 70B's layer,
#   without sums and with products that send, by tokens, with the rule -> rule.json, and without -> without.json; at 2,048,
#   3,072 and 4,096 tokens what larger iterations would save. Where the rule is not the quicker its bound becomes 512 again.
#   Last, if there is time, total tokens/s of 1024/512 x 1000 (x 300 on two) with milliseconds of iterations by their tokens
#   -> whole.json: where a run loses what its fullest iterations reach.
#   RANKS: on so many GPUs instead of two.
set -u
export COLUMNS=140
python -m pytest -q -s --durations=0 -p no:cacheprovider -o timeout=120 -k "batch_invarian and (${RANKS:-2}_ranks or not _ranks)" \
    tests/gpu/test_executor.py tests/gpu/test_plans.py tests/gpu/test_ranks.py
model="--model-preset llama-3-70b --tensor-parallel-size ${RANKS:-2}"
ranks="python -m weft.server bench ranks $model --rounds 1 --seconds 1.2 --ways none,sent-two"
$ranks --tokens 576 640 704 768 896 1024 2048 3072 4096 --json "$OUT/rule.json"
place=$(mktemp -d)
mkdir "$place/weft"
tar -c --exclude ./.git --exclude ./build --exclude ./.venv . | tar -x -C "$place/weft"
sed -i 's/^\(FEWEST_TOKENS, MOST_TOKENS = 65\), .*/\1, 512/' "$place/weft/kernels/mid_rule.py"
(cd "$place/weft" && PYTHONPATH="$place:$PYTHONPATH" $ranks --tokens 576 640 704 768 896 1024 --json "$OUT/without.json")
if [ $((SECONDS + 180)) -lt "$SECONDS_LEFT" ]; then
    count=300
    if [ "${RANKS:-2}" = 4 ]; then count=1000; fi
    python -m weft.server bench offline $model --load-format dummy --workload 1024:512:$count --json "$OUT/whole.json"
fi
