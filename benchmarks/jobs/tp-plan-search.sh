# Question: Does `weft search` find a plan for a 72B on several GPUs within its budget?
# Hardware: 2 GPUs
# Time: 270 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-plan-search
#     Variables: RANKS=2; PRESET=qwen2.5-72b; KEPT: the kept/ folder of an earlier run to resume
# Read: plan.json and plan.svg are the plan, log.txt has the gains. A plan without pipelines is an answer too. kept/ has what
#     was measured and solved. tp-plan runs the plan.
set -u
export COLUMNS=140
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weft
mkdir -p "$cache" "$OUT/kept"
if [ -n "${KEPT:-}" ]; then cp -r "$KEPT"/. "$OUT/kept"; fi
for folder in searches profiles; do
    mkdir -p "$OUT/kept/$folder"
    if [ -d "$cache/$folder" ] && [ ! -L "$cache/$folder" ]; then
        cp -r "$cache/$folder"/. "$OUT/kept/$folder"
        rm -r "${cache:?}/$folder"
    fi
    ln -sfn "$OUT/kept/$folder" "$cache/$folder"
done
cp -n "$OUT"/kept/gemm-*.json "$OUT"/kept/sums-*.json "$cache" 2>/dev/null
begun=$SECONDS
# The first signal ends the search with the best plan so far.
timeout --foreground -s INT $((SECONDS_LEFT > 80 ? SECONDS_LEFT - 40 : 40)) python -m weft.server search --model-preset "${PRESET:-qwen2.5-72b}" \
    --tensor-parallel-size ${RANKS:-2} --workload 1024:512 --budget-seconds 220 --measure-seconds 0.3 --tuning-seconds 20 \
    --out "$OUT/plan.json" --svg "$OUT/plan.svg"
status=$?
echo "exit status $status after $((SECONDS - begun)) s"
cp "$cache"/gemm-*.json "$cache"/sums-*.json "$OUT/kept" 2>/dev/null
cp "$OUT/plan.json" "$OUT/kept" 2>/dev/null
exit $status
