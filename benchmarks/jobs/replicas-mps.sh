# Question: What do two and four engines under MPS gain on one GPU, over turns and over one engine?
# Hardware: 1 GPU
# Time: 200 s
# Run: python benchmarks/jobs/run.py build/jobs --lane replicas-mps
#     Variables: MODEL=opt-1.3b, USERS=1152, SECONDS_EACH=12, ROWS="mps-2 turns-2 one mps-4 turns-4", KILL=1 (also kill an engine)
# Read: log.txt has output tokens/s and the tokens of a greedy answer for one engine, and for two and four in turns and under MPS.
#     The answers are equal. Under MPS the log of the daemon says so. The last line counts no process and no folder that is left.
set -e
begin() { # name, flags of serve
    name=$1
    shift
    port=$(python benchmarks/jobs/free_port.py)
    python -m weft.server serve --model-preset "${MODEL:-opt-1.3b}" --load-format dummy --port "$port" \
        --no-prefix-caching --max-model-len 1024 --api-workers 4 "$@" > "$OUT/serve-$name.log" 2>&1 &
    server=$!
    trap 'kill -9 $server' EXIT
    python benchmarks/jobs/wait_ready.py "$port" $server 120
    grep -h MPS "$OUT/serve-$name.log" || true
    curl -s "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' -d \
        '{"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": true, "return_token_ids": true}' \
        > "$OUT/answer-$name.json"
    python -c "import json, sys; print(json.load(open(sys.argv[1]))['choices'][0])" "$OUT/answer-$name.json"
    python -m weft.server load --server "http://127.0.0.1:$port" --users "${USERS:-1152}" --processes 4 \
        --input 161 --output 338 --duration "${SECONDS_EACH:-12}s" --warmup 4s --json "$OUT/load-$name.json" \
        > "$OUT/load-$name.txt" 2>&1
    echo "$name: $(grep -h 'output tokens/s' "$OUT/load-$name.txt" | head -1)"
    [ -z "$KILL" ] || [ "$name" != mps-2 ] || KILL_SECONDS=10 python benchmarks/jobs/kill_engine.py "$OUT" "$port" $server users=192
    kill $server
    wait $server || true
    trap - EXIT
}
for row in ${ROWS:-mps-2 turns-2 one mps-4 turns-4}; do
    case $row in
    one) begin one ;;
    mps-*) begin "$row" --replicas "${row#*-}" --mps ;;
    turns-*) begin "$row" --replicas "${row#*-}" ;;
    esac
done
echo "left: $(pgrep -c nvidia-cuda-mps || true) processes, $(find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'weft-mps-*' | wc -l) folders"
