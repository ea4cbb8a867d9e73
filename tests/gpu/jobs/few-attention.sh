# seconds 400
# gpus 1
# asks: what one request and a few gain by attention whose K and V arrive while the product before it ends (`few_decode`)
# No GPU has run this kernel (interpreted and compiled only). tests.txt: its tests first; what fails there stops the job.
# few.txt: a line a format, count of requests, context and kernel: microseconds of a layer, of which attention adds 12 in
#   FP8 and 12.3 in bf16 (one request, 1,280 tokens; 2026-11-24). What runs at 32,768 tokens must not be slower.
# Then whole engines by turns, with-*.json and without-*.json: output tokens/s of one request (FP8: 350 with the prefill,
#   370 asked for behind the first token; bf16: 227 and 230.6, 235 asked for) and of 16.
# If it pays: `TritonAttention.few = MOST_TOKENS`, the best of per_sm and registers as defaults. If not, delete it.
timeout -k 5 ${TEST_SECONDS:-150} python -m pytest -q -x tests/gpu/test_few_decode.py > "$OUT/tests.txt" 2>&1
failed=$?
echo "tests: exit status $failed: $(tail -n 1 "$OUT/tests.txt")"
[ $failed = 0 ] || [ $failed = 124 ] || exit 1
timeout -k 5 ${CHAIN_SECONDS:-120} python tests/gpu/jobs/few_attention.py ${CHAIN_OPTIONS:-} 2>&1 | tee "$OUT/few.txt"
bench() { # with or without, NAME, OPTION ...
    local way=$1 name=$1-$2 command="-m weft.server"
    shift 2
    [ $way = with ] && command=tests/gpu/jobs/with_few.py
    python $command bench offline --load-format dummy --no-prefix-caching --trace-iterations 8 --model-preset llama-3-8b \
        --json "$OUT/$name.json" "$@" > "$OUT/$name.txt" 2>&1 || echo "$name: exit status $?"
    python -c "
import json
f = json.load(open('$OUT/$name.json'))
print('$name', *(round(f[k], 1) for k in ('total_tokens_per_second', 'output_tokens_per_second', 'watts', 'sm_megahertz')))"
}
for turn in 1 2; do
    for way in with without; do
        [ $((SECONDS_LEFT - SECONDS)) -lt 40 ] && exit 0
        bench $way fp8-$turn --quantization fp8 --kv-cache-dtype fp8 --workload 1024:256:1 --then 1024:256:16
        bench $way bf16-$turn --plan serial --workload 1024:256:1
    done
done
