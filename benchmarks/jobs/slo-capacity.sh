# Question: At which rate does the mean latency per output token of an 8B reach 200 ms, with a plan and without?
# Hardware: 1 GPU
# Time: 560 s
# Run: python benchmarks/jobs/run.py build/jobs --lane slo-capacity
#     Variables: PRESETS="sharegpt lmsys splitwise", RATE=20 to begin with, DURATION=20s a rate, PLANS="auto serial"
# Read: log.txt has the highest rate within the objective for each preset and plan (NanoFlow, Figure 8). sweep-*.html has latency over
#     rate. sweep-*.json has `p99_over_mean` of the normalized latency at each rate.
for plan in ${PLANS:-auto serial}; do
    port=$(python benchmarks/jobs/free_port.py)
    python -m weft.server serve ${SERVED:---model-preset llama-3-8b --load-format dummy} --port "$port" --plan "$plan" \
        --no-prefix-caching --api-workers 4 > "$OUT/serve-$plan.log" 2>&1 &
    server=$!
    trap 'kill -9 $server' EXIT
    python benchmarks/jobs/wait_ready.py "$port" $server 120 || exit 1
    for preset in ${PRESETS:-sharegpt lmsys splitwise}; do
        name=$plan-$preset
        [ $((SECONDS_LEFT - SECONDS)) -lt 60 ] && echo "$name: no time was left" && continue
        python -m weft.server load sweep --server "$name=http://127.0.0.1:$port" --preset "$preset" --slo nanoflow \
            --rate "${RATE:-20}" --duration "${DURATION:-20s}" --precision 0.1 --processes 4 --max-context 8000 \
            --json "$OUT/sweep-$name.json" --html "$OUT/sweep-$name.html" > "$OUT/sweep-$name.txt" 2>&1 || true
        grep -h "highest rate\|no rate" "$OUT/sweep-$name.txt" || tail -2 "$OUT/sweep-$name.txt"
    done
    kill $server
    wait $server || true
    trap - EXIT
done
