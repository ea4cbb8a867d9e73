# Question: Do several engines multiply throughput, keep the cache hits, and survive a kill?
# Hardware: 2 GPUs
# Time: 150 s
# Run: python benchmarks/jobs/run.py build/jobs --all data-parallel
#     Variables: ENGINES=2; MODEL: options of serve, such as --tensor-parallel-size 4; CLIENTS: of each engine in the closed
#     loop; USERS, TALKS, KILL_RATE: of all engines; WORKERS: API processes
# Read: log.txt compares one engine with `--data-parallel-size`: the share of prompt tokens found in the cache (0.98 of one
#     engine's is the floor), closed-loop tokens/s, then a `kill -9` of one engine. Only streams that had begun on the killed
#     engine may be lost, and the longest gap of the others is at most 200 ms.
set -e
engines=${ENGINES:-2} clients=${CLIENTS:-320} WORKERS=${WORKERS:-4}
begin() { # name, flags of serve
    local name=$1
    shift
    port=$(python benchmarks/jobs/free_port.py)
    python -m weft.server serve ${MODEL:---model-preset llama-3-8b --load-format dummy} --port "$port" \
        --api-workers "$WORKERS" "$@" > "$OUT/serve-$name.log" 2>&1 &
    server=$!
    trap 'kill -9 $server' EXIT
    python benchmarks/jobs/wait_ready.py "$port" $server
}
end() {
    kill $server
    wait $server || true
    trap - EXIT
}
talk() { # name: conversations
    python -m weft.server load --server "http://127.0.0.1:$port" --users "${USERS:-96}" --turns "${TURNS:-6}" --think 200ms \
        --input "${TURN_INPUT:-lognormal:300:150}" --output "${TURN_OUTPUT:-32}" --requests "${TALKS:-240}" --seed 3 --quiet \
        --processes "$WORKERS" --json "$OUT/talk-$1.json" > "$OUT/talk-$1.txt"
    python benchmarks/jobs/print_loads.py "$OUT/talk-$1.json"
}
closed() { # name, clients
    python -m weft.server load --server "http://127.0.0.1:$port" --users "$2" --duration "${DURATION:-16s}" \
        --input "${INPUT:-lognormal:512:256}" --output "${OUTPUT:-lognormal:128:64}" --seed 5 --quiet \
        --processes "$WORKERS" --json "$OUT/closed-$1.json" > "$OUT/closed-$1.txt" || true
    python benchmarks/jobs/print_loads.py "$OUT/closed-$1.json"
}
begin several --data-parallel-size "$engines"
talk several
closed several $((engines * clients))
python benchmarks/jobs/kill_engine.py "$OUT" "$port" $server "${KILL_RATE:-$((20 * engines))}"
end
begin one
talk one
closed one "$clients"
end
python benchmarks/jobs/compare_engines.py "$OUT" "$engines"
