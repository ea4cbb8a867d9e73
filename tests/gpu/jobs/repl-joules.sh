# seconds 420
# gpus 1
# asks: does the advised rate keep the objectives in three runs of a minute (DURATION=35s behind `repl-advise`), and 15 % more miss them; joules a token at both
#
# Reads the configuration that repl-advise left beside it; else that of ADVICE (a weft.yaml), else RATE and the 8B with
# 108 requests at once, an earlier advice for 256:128. Rates alternate, so that a slow card is none of the difference.
# An advice is right with kept, kept, kept and missed, missed, missed. One that is kept at 15 % more is too careful
# (the knee lies higher), one that misses at its own rate is wrong: `RateSearch` is wrong then, not the margin.
# BENCHMARKS.md "How many at once on an H200", the table of runs; joules to "Joules on the H200".
set -e
ADVICE=${ADVICE:-$OUT/../repl-advise/weft.yaml}
port=${PORT:-$(python tests/gpu/jobs/free_port.py)}
if [ -s "$ADVICE" ]; then
    said=$(grep -o 'objectives: .*; requests a second at most: .*' "$ADVICE")
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
python tests/gpu/jobs/ready.py "$port" $server
counted() { # joules.txt: what requests and rest add up to beside the driver's counter, so far
    python tests/gpu/jobs/joules.py "$port" "$OUT/joules.jsonl" 2>&1 | tee -a "$OUT/joules.txt"
}
sleep 3  # at rest: what that draws is known
counted
for run in ${RUNS:-1 2 3}; do
    for times in ${TIMES:-1 1.15}; do
        more=$(python -c "print(round($rate * $times, 3))")
        python -m weft.server load --server "http://127.0.0.1:$port" --rate "$more" --duration "${DURATION:-60s}" --seed "$run${times#*.}" \
            --input "${workload%:*}" --output "${workload#*:}" --processes "${WORKERS:-4}" $(printf -- '--slo %s ' $slo) \
            --quiet --json "$OUT/x$times-$run.json" > "$OUT/x$times-$run.txt" && kept=kept || kept=missed
        python tests/gpu/jobs/loads.py "$OUT/x$times-$run.json" | sed "s/^/x$times $kept  /"
        counted
    done
done
