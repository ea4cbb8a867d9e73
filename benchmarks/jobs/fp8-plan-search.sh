# Question: Does a search find a plan for Llama-3-8B with FP8 weights that beats the serial plan?
# Hardware: 1 GPU
# Time: 400 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-plan-search
#     Variables: SEARCH_SECONDS=200; SEARCH_GIVEN: the cache/ folder of an earlier run to resume
# Read: plan.json is the plan and log.txt its report. A plan without pipelines means that the serial plan won. Otherwise
#     plan-500.json and serial-500.json compare both end to end. Ship a plan only if it is faster there.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weft
given=${SEARCH_GIVEN:-build/given/fp8-search}
for part in profiles searches; do
    mkdir -p "$cache/$part" "$OUT/cache/$part"
    [ -d "$given/cache/$part" ] && cp "$given/cache/$part"/* "$cache/$part/"
done
keep() {
    for part in profiles searches; do cp "$cache/$part"/* "$OUT/cache/$part/" 2>/dev/null; done
}
budget=${SEARCH_SECONDS:-200}
[ $budget -gt $((SECONDS_LEFT - 40)) ] && budget=$((SECONDS_LEFT - 40))
python -m weft.server search --model-preset "${PRESET:-llama-3-8b}" --quantization fp8 --workload 1024:512 \
    --tuning-seconds 30 --budget-seconds "$budget" --out "$OUT/plan.json" --svg "$OUT/plan.svg" ${SEARCH_OPTIONS:-} &
search=$!
while kill -0 $search 2>/dev/null; do
    # The search deletes its measurements once it has written the plan.
    keep
    if [ $((SECONDS_LEFT - SECONDS)) -lt 25 ]; then
        kill -TERM $search # it writes the best plan so far
        for _ in $(seq 18); do kill -0 $search 2>/dev/null && sleep 1; done
        kill -KILL $search 2>/dev/null
        break
    fi
    sleep 1
done
wait $search
echo "search: exit status $?, $SECONDS s"
keep
python - "$OUT/plan.json" <<'END' || exit 0
import json, sys
periods = json.load(open(sys.argv[1]))["periods"]
print(len(periods), "pipelines, gains", [period["figures"].get("gain") for period in periods])
sys.exit(not periods)
END
for plan in "$OUT/plan.json" serial; do
    name=$(basename "$plan" .json)-500
    [ $((SECONDS_LEFT - SECONDS)) -lt 45 ] && echo "$name: no time was left" && continue
    timeout -k 5 $((SECONDS_LEFT - SECONDS - 3)) python -m weft.server bench offline --model-preset llama-3-8b \
        --load-format dummy --quantization fp8 --no-prefix-caching --trace-iterations 0 --wait-for-plan --plan "$plan" \
        --workload 1024:512:500 --json "$OUT/$name.json"
done
