# seconds 280
# gpus 1
# asks: what an engine gains because attention leaves the operand of the product behind it, in FP8 (weights and KV)
# Four runs by turns, with.json: a pass behind attention quantises, as it was; without.json: attention does. Total tokens/s at
# 1024/512 x 500 (45,670 x 2000 with the pass on 2026-11-23) and output tokens/s of one request behind them (297). Expected:
# 1 to 2 % of one request, less of many. First the tests of these epilogues: a GPU ran 108 of their cases,
# and 13 more up to a check of their own data, since mended.
timeout -k 5 ${TEST_SECONDS:-120} python -m pytest -q -x tests/gpu/test_attention_output.py > "$OUT/tests.txt" 2>&1
echo "tests: exit status $?: $(tail -n 1 "$OUT/tests.txt")"
for turn in 1 2; do
    for way in with without; do
        [ $((SECONDS_LEFT - SECONDS)) -lt 60 ] && exit 0
        command="-m weft.server"
        [ $way = with ] && command=tests/gpu/jobs/with_pass.py
        python $command bench offline --load-format dummy --no-prefix-caching --trace-iterations 0 --model-preset llama-3-8b \
            --quantization fp8 --kv-cache-dtype fp8 --workload 1024:512:500 --then 1024:512:1 --json "$OUT/$way$turn.json" \
            > "$OUT/$way$turn.txt" 2>&1 || echo "$way: exit status $?"
        tail -n 3 "$OUT/$way$turn.txt"
    done
done
