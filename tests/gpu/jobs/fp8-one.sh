# seconds 90
# gpus 1
# asks: where one request's time goes in FP8, and a 1B's iteration
# one1.json, one2.json: a request of 1024/256 (350 tokens/s with the prefill on 2026-11-24, 355 behind the first token; 292
# with the tiles in plain Triton that were shipped, 307 with those that a start tuned; 370 asked for), bf16.json (224) to
# tell cards apart; the logs have kernels by time. 1b.json: 161/338 with 3,072 seats (238,824 tokens/s; 250,000 asked for)
# and which kernels its milliseconds go to.
bench() { # NAME OPTION ...
    local name=$1
    shift
    python -m weft.server bench offline --load-format dummy --no-prefix-caching --trace-iterations 8 \
        --json "$OUT/$name.json" "$@" > "$OUT/$name.txt" 2>&1 || echo "$name: exit status $?"
    python -c "
import json
f = json.load(open('$OUT/$name.json'))
print('$name', *(round(f[k], 1) for k in ('total_tokens_per_second', 'output_tokens_per_second', 'watts', 'sm_megahertz')))"
}
eight="--quantization fp8 --kv-cache-dtype fp8"
for turn in 1 2; do
    bench one$turn --model-preset llama-3-8b $eight --workload 1024:256:1
done
bench bf16 --model-preset llama-3-8b --plan serial --workload 1024:256:1
bench 1b --model tests/gpu/jobs/llama-1b $eight --max-num-batched-tokens 4096 --max-num-seqs 3072 --workload 161:338:9000
