# seconds 130
# gpus 2
# asks: whether an engine of two ranks takes the plan that tp-search wrote beside this job's folder (else KEPT/plan.json), in
#   how many iterations it runs it, and its tokens/s, W of both and tokens/J beside the serial plan's -> plan.json,
#   serial.json; 1024/512 x 160 of a Qwen2.5-72B shape, whole runs. Into "Pipelines that hide sums" in BENCHMARKS.md.
#   Where the plan has no pipeline, the shape is served serially, once.
set -u
export COLUMNS=140
plan=$OUT/../tp-search/plan.json
if [ ! -f "$plan" ]; then plan=${KEPT:-.}/plan.json; fi
if [ ! -f "$plan" ]; then echo "no plan: neither $plan nor in KEPT" && exit 1; fi
offline="python -m weft.server bench offline --model-preset qwen2.5-72b --load-format dummy --tensor-parallel-size 2"
offline="$offline --workload 1024:512:160 --trace-iterations 0"
if [ "$(python -c "import json, sys; print(len(json.load(open(sys.argv[1]))['periods']))" "$plan")" != 0 ]; then
    $offline --plan "$plan" --json "$OUT/plan.json"
fi
$offline --plan serial --json "$OUT/serial.json"
