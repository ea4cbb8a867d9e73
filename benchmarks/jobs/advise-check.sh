# Question: Does a daemon keep the objectives at the advised rate, and miss them at 15 % more?
# Hardware: 1 GPU
# Time: 420 s
# Run: python benchmarks/jobs/run.py build/jobs --lane advise-check
#     Variables: ADVICE: a weft.yaml (default: the one that `advise` left); DURATION=60s, RUNS, TIMES
# Read: log.txt has one line a run with "kept" or "missed". The advice is right if all runs at the rate keep the objectives and
#     all runs at 1.15 times miss them. joules.txt compares the daemon's energy metrics with the driver's counter.
set -e
ADVICE=${ADVICE:-$OUT/../advise/weft.yaml}
port=${PORT:-$(python benchmarks/jobs/free_port.py)}
if [ -s "$ADVICE" ]; then
    said=$(grep -oE 'objectives: .*; requests (a|per) second at most: .*' "$ADVICE")
    rate=${RATE:-${said##*: }}
    slo=${SLO:-$(echo "$said" | sed 's/objectives: //; s/;.*//; s/,//g')}
    workload=${WORKLOAD:-$(sed -n 's/^# weft advise, .*, workload \([0-9]*:[0-9]*\),.*/\1/p' "$ADVICE")}
    flags="--config $ADVICE"
else
    rate=${RATE:-69.6}
    slo=${SLO:-itl:p99:40ms ttft:p99:500ms}
    workload=${WORKLOAD:-256:128}
    flags=${MODEL:---model-preset llama-3-8b --load-format dummy}" --max-num-seqs 108"
fi
echo "$rate requests a second of $workload, $slo, $flags"
python -m weft.server serve $flags --port "$port" --api-workers "${WORKERS:-4}" > "$OUT/serve.log" 2>&1 &
server=$!
trap 'kill $server; wait $server' EXIT
python benchmarks/jobs/wait_ready.py "$port" $server
counted() { # joules.txt: requests plus idle as a share of the driver's counter so far
    python benchmarks/jobs/check_energy.py "$port" "$OUT/joules.jsonl" 2>&1 | tee -a "$OUT/joules.txt"
}
sleep 3  # measure the idle power
counted
for run in ${RUNS:-1 2 3}; do
    for times in ${TIMES:-1 1.15}; do
        more=$(python -c "print(round($rate * $times, 3))")
        python -m weft.server load --server "http://127.0.0.1:$port" --rate "$more" --duration "${DURATION:-60s}" \
            --seed "$run${times#*.}" --input "${workload%:*}" --output "${workload#*:}" --processes "${WORKERS:-4}" \
            $(printf -- '--slo %s ' $slo) \
            --quiet --json "$OUT/x$times-$run.json" > "$OUT/x$times-$run.txt" && kept=kept || kept=missed
        python benchmarks/jobs/print_loads.py "$OUT/x$times-$run.json" | sed "s/^/x$times $kept  /"
        counted
    done
done
