# seconds 270
# gpus 2
# asks: whether `weft search` of a Qwen2.5-72B shape on two GPUs comes to a written plan by itself -> plan.json, plan.svg
#   (the line; no such plan was seen yet), what it measured for the serial plan and for pipelines that hide sums
#   (log.txt), and seconds. Gains go into "Pipelines that hide sums" in BENCHMARKS.md; a plan without a pipeline is an
#   answer too, and then docs/tensor-parallel.md says that the search finds none. tp-plan runs the plan.
#   What it has measured, solved and tuned is written to kept/ as it goes. If it is cut off, the next run goes on when
#   KEPT names that folder, on another machine too; the log then says with how many measurements.
#   RANKS: on so many GPUs instead of two.
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
# The first signal ends a search with the best so far.
timeout --foreground -s INT $((SECONDS_LEFT > 80 ? SECONDS_LEFT - 40 : 40)) python -m weft.server search --model-preset qwen2.5-72b \
    --tensor-parallel-size ${RANKS:-2} --workload 1024:512 --budget-seconds 220 --measure-seconds 0.3 --tuning-seconds 20 \
    --out "$OUT/plan.json" --svg "$OUT/plan.svg"
status=$?
echo "exit status $status after $((SECONDS - begun)) s"
cp "$cache"/gemm-*.json "$cache"/sums-*.json "$OUT/kept" 2>/dev/null
cp "$OUT/plan.json" "$OUT/kept" 2>/dev/null
exit $status
