# Question: Is bf16 throughput the same as in an earlier tree, on one card in one run?
# Hardware: 1 GPU
# Time: 330 s
# Run: python benchmarks/jobs/run.py build/jobs --lane compare-trees
#     Variables: BEFORE=old.tgz (made by `git archive COMMIT | gzip`)
# Read: log.txt has one line a run; before-N.json and now-N.json have the full figures. The two trees alternate, each with its
#     own defaults and plan. Compare runs with the same number of requests: a ratio of 0.99 or less is a regression.
[ -s "${BEFORE:-}" ] || { echo "set BEFORE to an archive of the tree to compare with"; exit 1; }
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
