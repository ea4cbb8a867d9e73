# Question: Do two engines that share one GPU survive a kill, and what does sharing cost?
# Hardware: 1 GPU
# Time: 90 s
# Run: python benchmarks/jobs/run.py build/jobs --lane replicas-one-gpu
#     Variables: MODEL, USERS_TOGETHER=192, KILL_SECONDS=12, KILL_OUTPUT=128
# Read: log.txt has the lost requests (only those that had begun on the killed engine), the longest gap of the others (500 ms at
#     most), output tokens/s of two engines and then of one, and GPU memory. A pause of 30 s in serve-two.log is a hang.
set -e
port=${PORT:-$(python benchmarks/jobs/free_port.py)}
export KILL_SECONDS=${KILL_SECONDS:-12} KILL_OUTPUT=${KILL_OUTPUT:-128}
begin() { # name, flags of serve
    name=$1
    shift
    python -m weft.server serve ${MODEL:---model-preset llama-3-8b --load-format dummy} --port "$port" \
        --api-workers "${WORKERS:-4}" "$@" > "$OUT/serve-$name.log" 2>&1 &
    server=$!
    trap 'kill -9 $server' EXIT
    python benchmarks/jobs/wait_ready.py "$port" $server 240
}
memory() {
    ! command -v nvidia-smi > /dev/null || nvidia-smi --query-gpu=memory.used,memory.total --format=csv,noheader
}
end() {
    kill $server
    wait $server || true
    trap - EXIT
}
begin two --replicas 2
memory
echo "two engines:"
python benchmarks/jobs/kill_engine.py "$OUT" "$port" $server "users=${USERS_TOGETHER:-192}"
python benchmarks/jobs/wait_ready.py "$port" $server 30
memory
python benchmarks/jobs/print_loads.py "$OUT/kill.json"
end
begin one
echo "one engine:"
python benchmarks/jobs/kill_engine.py "$OUT" "$port" 0 "users=${USERS_TOGETHER:-192}"
python benchmarks/jobs/print_loads.py "$OUT/alone.json"
end
