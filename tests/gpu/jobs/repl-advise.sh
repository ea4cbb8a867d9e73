# seconds 510
# gpus 1
# asks: does `weft advise` find bound and rate of the 8B with its default budget (480 s) and workload (161:338)
#
# Neither had run on a GPU since a point lasts until as many requests have ended as run. Answers: advice.txt (the report),
# weft.yaml, advice.html, advice.png, points.json (goes on from there, if the time ends early: `--points`). Sound is a
# curve without dips of a third, `replicas: 1` with its reason, and an advised rate with three of three runs kept and
# 15 % more missed. Whether that holds outside says repl-joules, which reads weft.yaml here.
# BENCHMARKS.md "How many at once on an H200": the advice, in place of the run of 87 s.
MODEL=${MODEL:---model-preset llama-3-8b --load-format dummy}
SLO=${SLO:-itl:p99:40ms ttft:p99:500ms}
# Time is kept for the start and the pages; what is left of less than the default is used whole.
budget=$((SECONDS_LEFT - 30 < 480 ? SECONDS_LEFT - 30 : 480))
COLUMNS=110 python -m weft.server advise $MODEL --slo $SLO --budget-seconds "${BUDGET:-$budget}" ${ADVISE_FLAGS:-} \
    --out "$OUT/weft.yaml" --points "$OUT/points.json" --html "$OUT/advice.html" --png "$OUT/advice.png" \
    > "$OUT/advice.txt" 2> "$OUT/advise.log"
status=$?
cat "$OUT/advice.txt" "$OUT/weft.yaml"
tail -n 3 "$OUT/advise.log"
exit $status
