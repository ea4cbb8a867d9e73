# Question: Does `--pod` change latency or throughput with prompts of 16K tokens near capacity?
# Hardware: 1 GPU
# Time: 370 s
# Run: python benchmarks/jobs/run.py build/jobs --lane long-prompts
#     Variables: MODEL=llama or yi; SHARES=0.7,0.95 of capacity; JUDGED=26 seconds a share
# Read: rows.txt has one line a share and daemon. The job first measures a capacity, then sends the same arrivals to daemons
#     with `--pod off`, `auto` and `on`. The capacity was wrong if requests were ready late, or if far more or fewer decode at
#     the end than expected. "auto" must not be worse than both others.
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
case "${MODEL:-llama}" in
    llama) # llama-3.1-8b is Llama-3-8B's shape with enough positions
        pages=11500 serve="--model-preset llama-3.1-8b --max-num-batched-tokens 1024" ;;
    yi) # with the positions of its long version
        place=$(mktemp -d)/yi-6b-long
        mkdir "$place"
        sed 's/"max_position_embeddings": 4096/"max_position_embeddings": 32768/' \
            engine/model/presets/yi-6b/config.json > "$place/config.json"
        pages=23000 serve="--model $place --max-num-batched-tokens 512" ;;
    *) echo "MODEL is llama or yi"; exit 1 ;;
esac
python benchmarks/jobs/latency.py "$OUT" long --num-pages $pages --seconds "${JUDGED:-26}" --shares "${SHARES:-0.7,0.95}" \
    --serve "$serve --load-format dummy --max-model-len 20000 --plan serial" \
    --way "off=--pod off" --way "auto=--pod auto" --way "on=--pod on"
