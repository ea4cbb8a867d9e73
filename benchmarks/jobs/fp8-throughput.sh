# Question: How fast is Llama-3-8B in FP8 compared with bf16, for many requests and for one?
# Hardware: 1 GPU
# Time: 280 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-throughput
#     Variables: REQUESTS=2000; RUNS_E2E: names of the runs to make
# Read: fp8.json and bf16.json have total tokens/s, tokens per joule, and output tokens/s of one request. fp8-one.json has the
#     traced kernels of one request. tiles/ has what the start tuned.
bench() {  # NAME OPTION ...
    local name=$1
    shift
    case " ${RUNS_E2E:-$name} " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $* ($SECONDS s so far, $SECONDS_LEFT in all)"
    python -m weft.server bench offline --load-format dummy --no-prefix-caching --trace-iterations 0 \
        --json "$OUT/$name.json" "$@" || echo "$name: exit status $?"
}
many=1024:512:${REQUESTS:-2000}
bench fp8 --model-preset llama-3-8b --quantization fp8 --kv-cache-dtype fp8 --workload "$many" --then 1024:512:1
bench fp8-one --model-preset llama-3-8b --quantization fp8 --kv-cache-dtype fp8 --workload 1024:256:1 --trace-iterations 8
bench bf16 --model-preset llama-3-8b --wait-for-plan --workload "1024:512:${BF16_REQUESTS:-${REQUESTS:-2000}}" --then 1024:512:1
mkdir -p "$OUT/tiles" && cp "${XDG_CACHE_HOME:-$HOME/.cache}"/weft/*.json "$OUT/tiles/"
