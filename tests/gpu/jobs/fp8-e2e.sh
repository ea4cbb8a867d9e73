# seconds 240
# gpus 1
# asks: Llama-3-8B in FP8 (weights and KV) beside bf16, 1024/512 x 2000, and one request of each engine
# Answers (fp8.json, bf16.json): total tokens/s of FP8 >= 45,000 (goal 52,000), tokens/joule >= 64, output tokens/s
# behind the first of one request >= 370 (goal 400); bf16 as fast as before (28,921 with its plan, x 2000).
# They replace the table of "FP8 end to end on one H200" in BENCHMARKS.md, whose engine had none of today's kernels,
# and decide what docs/quantization.md says of FP8's speed. REQUESTS=1000 takes 130 s. tiles/ has what the start tuned:
# tables that could be shipped (kernels/gemm_h200.json) so that no start has to.
bench() {  # NAME OPTION ...
    local name=$1
    shift
    echo "== $name: $* ($SECONDS s so far, $SECONDS_LEFT in all)"
    python -m weft.server bench offline --load-format dummy --no-prefix-caching --trace-iterations 0 \
        --json "$OUT/$name.json" "$@" || echo "$name: exit status $?"
}
many=1024:512:${REQUESTS:-2000}
bench fp8 --model-preset llama-3-8b --quantization fp8 --kv-cache-dtype fp8 --workload "$many" --then 1024:512:1
bench bf16 --model-preset llama-3-8b --wait-for-plan --workload "$many" --then 1024:512:1
mkdir -p "$OUT/tiles" && cp "${XDG_CACHE_HOME:-$HOME/.cache}"/weft/*.json "$OUT/tiles/"
