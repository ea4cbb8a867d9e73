# seconds 330
# gpus 1
# asks: whether 16 bits are as fast as in an earlier tree, on one card in one run
# BEFORE: an archive of that tree (git archive COMMIT | gzip). before-N.json and now-N.json: 1024/512 of Llama-3-8B's shape in
#   bf16 by turns, each tree with its own defaults and plan; the first of each compiles and tunes before it is timed. The log
#   has a line a run. What counts is the ratio of runs of as many requests: 0.99 or less of before says what was lost.
[ -s "${BEFORE:-}" ] || { echo "BEFORE names no archive of the tree to compare with"; exit 1; }
place=$(mktemp -d)
mkdir -p "$place/before/weft" "$place/now/weft"
tar -xz -C "$place/before/weft" -f "$BEFORE"
tar -c --exclude=.git --exclude=./build --exclude=.venv . | tar -x -C "$place/now/weft"
run() { # before or now, requests
    local begun=$SECONDS
    (cd "$place/$1" && PYTHONPATH="$place/$1:$PYTHONPATH" python -m weft.server bench offline --load-format dummy \
        --model-preset llama-3-8b --no-prefix-caching --trace-iterations 0 --workload "1024:512:$2" \
        --json "$OUT/$1-$2.json" > "$OUT/$1-$2.txt" 2>&1) || tail -n 5 "$OUT/$1-$2.txt"
    python -c "
import json
f = json.load(open('$OUT/$1-$2.json'))
print('$1', '$2', *(round(f.get(k, 0), 2) for k in ('total_tokens_per_second', 'tokens_per_joule', 'watts', 'sm_megahertz')))"
    echo "    in $((SECONDS - begun)) s"
}
run before 1000
run now 1000
run now 600
run before 600
