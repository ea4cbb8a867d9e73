# Question: Do two engines on two GPUs double throughput, keep the cache hits, and survive a kill?
# Hardware: 2 GPUs
# Time: 150 s
# Run: python benchmarks/jobs/run.py build/jobs --all data-parallel
#     Variables: MODEL, USERS, TALKS, CLIENTS1, CLIENTS2, KILL_RATE
# Read: log.txt compares one engine with `--data-parallel-size 2`: the share of prompt tokens found in the cache (0.90 of one
#     engine's is the floor), closed-loop tokens/s, then a `kill -9` of one engine. Only streams that had begun on the killed
#     engine may be lost, and the longest gap of the others is at most 200 ms.
set -e
port=${PORT:-$(python benchmarks/jobs/free_port.py)}
begin() { # flags of serve
    python -m weft.server serve ${MODEL:---model-preset llama-3-8b --load-format dummy} --port "$port" \
        --api-workers "${WORKERS:-4}" "$@" > "$OUT/serve$*.log" 2>&1 &
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
        --processes "${WORKERS:-4}" --json "$OUT/talk-$1.json" > "$OUT/talk-$1.txt"
    python benchmarks/jobs/print_loads.py "$OUT/talk-$1.json"
}
closed() { # name, clients
    python -m weft.server load --server "http://127.0.0.1:$port" --users "$2" --duration "${DURATION:-16s}" \
        --input "${INPUT:-lognormal:512:256}" --output "${OUTPUT:-lognormal:128:64}" --seed 5 --quiet \
        --processes "${WORKERS:-4}" --json "$OUT/closed-$1.json" > "$OUT/closed-$1.txt" || true
    python benchmarks/jobs/print_loads.py "$OUT/closed-$1.json"
}
begin --data-parallel-size 2
talk two
closed two "${CLIENTS2:-640}"
python benchmarks/jobs/kill_engine.py "$OUT" "$port" $server "${KILL_RATE:-40}"
end
begin
talk one
python - "$OUT" <<'PY'
import json, sys
share = {}
for name in ("one", "two"):
    tokens = json.load(open(f"{sys.argv[1]}/talk-{name}.json"))["runs"][0]["tokens"]
    share[name] = tokens["prompt_cached"] / tokens["prompt_received"]
print(f"two engines find {share['two'] / share['one']:.4f} of what one finds ({share})", flush=True)
PY
closed one "${CLIENTS1:-320}"
python - "$OUT" <<'PY'
import json, sys
seconds = [json.load(open(f"{sys.argv[1]}/closed-{name}.json"))["runs"][0]["throughput"] for name in ("one", "two")]
for what in ("output_tokens_per_second", "prompt_tokens_per_second"):
    print(f"{what}: {seconds[1][what] / seconds[0][what]:.3f} times one engine", flush=True)
PY
end
