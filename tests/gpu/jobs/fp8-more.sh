# seconds 290
# gpus 1
# asks: the same with realistic weights, FP8 weights alone, 1B in FP8, and FP8 with a wider dense batch
# Behind fp8-e2e on the same machine: its kernels and tiles are then there. Answers, a file each, in the order of value:
# realistic and realistic-bf16 (what operands that look trained cost: both rows go beside the plain ones), 1b (161/338
# x 6000: >= 250,000 tokens/s) and 1b-bf16, weights (FP8 weights, KV in 16 bits: many and one request), wide (4,096
# batched tokens: if it beats fp8-e2e's fp8.json, that is what docs/quantization.md advises). "FP8 end to end" of
# BENCHMARKS.md gets the rows.
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
small=tests/gpu/jobs/llama-1b
many=1024:512:${REQUESTS:-600}
one=1024:512:1
bench wide $model $eight --max-num-batched-tokens 4096 --max-num-seqs 2048 --workload "1024:512:${WIDE_REQUESTS:-2000}"
bench realistic $model $eight --dummy-weights realistic --workload "$many" --then $one
bench realistic-bf16 $model --wait-for-plan --dummy-weights realistic --workload "$many"
bench 1b --model "$small" $eight --workload "161:338:${SMALL_REQUESTS:-6000}"
bench 1b-wide --model "$small" $eight --max-num-batched-tokens 4096 --max-num-seqs 3072 --workload "161:338:${SMALL_REQUESTS:-9000}"
bench 1b-seats --model "$small" $eight --max-num-seqs 2048 --workload "161:338:${SMALL_REQUESTS:-6000}"
bench weights $model --quantization fp8 --workload "$many" --then $one
bench 1b-bf16 --model "$small" --workload "161:338:${SMALL_REQUESTS:-6000}"
