# Question: Does `weft advise` find a sound slot limit and rate for an 8B with its default budget?
# Hardware: 1 GPU
# Time: 510 s
# Run: python benchmarks/jobs/run.py build/jobs --lane advise
#     Variables: MODEL, SLO, BUDGET, ADVISE_FLAGS; needs about 8 minutes
# Read: advice.txt is the report and weft.yaml the configuration. The curve is sound if it has no dips of a third, the advised
#     rate kept the objectives in three of three runs, and 15 % more missed them. advise-check holds the advice against a daemon.
MODEL=${MODEL:---model-preset llama-3-8b --load-format dummy}
SLO=${SLO:-itl:p99:40ms ttft:p99:500ms}
# Keep 30 s for the start and the report; a shorter run uses all the time that is left.
budget=$((SECONDS_LEFT - 30 < 480 ? SECONDS_LEFT - 30 : 480))
COLUMNS=110 python -m weft.server advise $MODEL --slo $SLO --budget-seconds "${BUDGET:-$budget}" ${ADVISE_FLAGS:-} \
    --out "$OUT/weft.yaml" --points "$OUT/points.json" --html "$OUT/advice.html" --png "$OUT/advice.png" \
    > "$OUT/advice.txt" 2> "$OUT/advise.log"
status=$?
cat "$OUT/advice.txt" "$OUT/weft.yaml"
tail -n 3 "$OUT/advise.log"
exit $status
