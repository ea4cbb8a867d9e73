# Question: What does `--pod` gain offline with prompts of 16K tokens, by prompt-to-output ratio and by chunk size?
# Hardware: 1 GPU
# Time: 540 s
# Run: python benchmarks/jobs/run.py build/jobs --lane pod-offline
#     Variables: MODEL=llama-3.1-8b, REQUESTS=48, TOKENS=16384 of prompt and output together, RATIOS="8 16 32", CHUNKS="512 2048"
# Read: log.txt has total tokens/s with `--pod off` and `on` for each ratio at chunks of 1,024 tokens (POD-Attention, Figures 12 and
#     15), then for each other chunk size at the middle ratio (Table 7). One run each, so take 1 % as equal.
preset=${MODEL:-llama-3.1-8b} tokens=${TOKENS:-16384} count=${REQUESTS:-48}
ratios=(${RATIOS:-8 16 32})
offline() { # name, ratio, chunk, --pod
    [ $((SECONDS_LEFT - SECONDS)) -lt 40 ] && echo "$1: no time was left" && return
    output=$((tokens / ($2 + 1)))
    python -m weft.server bench offline ${SERVED:---model-preset $preset --load-format dummy} --plan serial --pod "$4" \
        --max-model-len $((tokens + 64)) --max-num-batched-tokens "$3" --no-prefix-caching \
        --workload $((tokens - output)):$output:$count --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1 || tail -2 "$OUT/$1.txt"
    echo "$1: $(grep -h 'total tokens per second' "$OUT/$1.txt" | tr -s ' │')"
}
for ratio in "${ratios[@]}"; do
    for pod in off on; do
        offline "ratio-$ratio-$pod" "$ratio" 1024 $pod
    done
done
for chunk in ${CHUNKS-512 2048}; do
    for pod in off on; do
        offline "chunk-$chunk-$pod" "${ratios[$((${#ratios[@]} / 2))]}" "$chunk" $pod
    done
done
