# Question: How does FP8 throughput change with weights, KV format, batch size and model size?
# Hardware: 1 GPU
# Time: 290 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-variants
#     Variables: RUNS: names of the runs to make; REQUESTS, WIDE_REQUESTS, SMALL_REQUESTS
# Read: One JSON file a run: wide (4,096 batched tokens), realistic and realistic-bf16 (weights with outlier channels), 1b,
#     1b-wide, 1b-slots and 1b-bf16 (Llama-3.2-1B's shape), weights (FP8 weights with 16-bit KV). Run it after fp8-throughput
#     on the same machine to reuse its kernels and tiles.
bench() {  # NAME OPTION ...
    local name=$1
    shift
    case " ${RUNS:-$name} " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $* ($SECONDS s so far, $SECONDS_LEFT in all)"
    python -m weft.server bench offline --load-format dummy --no-prefix-caching --trace-iterations 0 \
        --json "$OUT/$name.json" "$@" || echo "$name: exit status $?"
}
eight="--quantization fp8 --kv-cache-dtype fp8"
model="--model-preset llama-3-8b"
small=benchmarks/jobs/llama-1b
many=1024:512:${REQUESTS:-600}
one=1024:512:1
bench wide $model $eight --max-num-batched-tokens 4096 --max-num-seqs 2048 --workload "1024:512:${WIDE_REQUESTS:-2000}"
bench realistic $model $eight --dummy-weights realistic --workload "$many" --then $one
bench realistic-bf16 $model --wait-for-plan --dummy-weights realistic --workload "$many"
bench 1b --model "$small" $eight --workload "161:338:${SMALL_REQUESTS:-6000}"
bench 1b-wide --model "$small" $eight --max-num-batched-tokens 4096 --max-num-seqs 3072 --workload "161:338:${SMALL_REQUESTS:-9000}"
bench 1b-slots --model "$small" $eight --max-num-seqs 2048 --workload "161:338:${SMALL_REQUESTS:-6000}"
bench weights $model --quantization fp8 --workload "$many" --then $one
bench 1b-bf16 --model "$small" --workload "161:338:${SMALL_REQUESTS:-6000}"
