# seconds 300
# gpus 2
# asks: whether an engine of two ranks takes the plan that tp-search wrote beside this job's folder (else KEPT/plan.json), in
#   how many iterations it runs it, and its tokens/s, W of both and tokens/J beside the serial plan's -> plan.json,
#   serial.json, and beside the serial one with the plan's own bound on an iteration -> bound.json; 1024/512 x 340 of a
#   Qwen2.5-72B shape, whole runs (of 160, which had too little KV for the pipelines, 13 % of the iterations ran in them, and
#   the plan lost 4 %). Into "A searched plan for a 72B" in BENCHMARKS.md. Is bound.json slower than serial.json by more than
#   the plan gains over it, a plan should leave the bound alone (`dense` in engine/runner/resolve.py).
#   Where the plan has no pipeline, the shape is served serially, once.
#   RANKS: on so many GPUs instead of two.
set -u
export COLUMNS=140
plan=$OUT/../tp-search/plan.json
if [ ! -f "$plan" ]; then plan=${KEPT:-.}/plan.json; fi
if [ ! -f "$plan" ]; then echo "no plan: neither $plan nor in KEPT" && exit 1; fi
offline="python -m weft.server bench offline --model-preset qwen2.5-72b --load-format dummy --tensor-parallel-size ${RANKS:-2}"
offline="$offline --workload 1024:512:${REQUESTS:-340} --trace-iterations 0"
if [ "$(python -c "import json, sys; print(len(json.load(open(sys.argv[1]))['periods']))" "$plan")" != 0 ]; then
    $offline --plan "$plan" --json "$OUT/plan.json"
    most=$(python -c "import json, sys; print(max(p['tokens'] for p in json.load(open(sys.argv[1]))['periods']))" "$plan")
    $offline --plan serial --max-num-batched-tokens "$most" --json "$OUT/bound.json"
fi
$offline --plan serial --json "$OUT/serial.json"
