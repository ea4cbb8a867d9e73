# Question: Is the plan that tp-plan-search found faster end to end than the serial plan?
# Hardware: 2 GPUs
# Time: 300 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-plan
#     Variables: RANKS=2; PRESET=qwen2.5-72b; KEPT: a folder with plan.json (default: that of tp-plan-search); REQUESTS=340
# Read: plan.json, serial.json and bound.json (the serial plan with the plan's limit on batched tokens) have tokens/s, watts and
#     tokens per joule. If bound.json is much slower than serial.json, the limit costs more than the plan gains.
set -u
export COLUMNS=140
plan=$OUT/../tp-plan-search/plan.json
if [ ! -f "$plan" ]; then plan=${KEPT:-.}/plan.json; fi
if [ ! -f "$plan" ]; then echo "no plan in $plan: run tp-plan-search first, or set KEPT" && exit 1; fi
offline="python -m weft.server bench offline --model-preset ${PRESET:-qwen2.5-72b} --load-format dummy --tensor-parallel-size ${RANKS:-2}"
offline="$offline --workload 1024:512:${REQUESTS:-340} --trace-iterations 0"
if [ "$(python -c "import json, sys; print(len(json.load(open(sys.argv[1]))['periods']))" "$plan")" != 0 ]; then
    $offline --plan "$plan" --json "$OUT/plan.json"
    most=$(python -c "import json, sys; print(max(p['tokens'] for p in json.load(open(sys.argv[1]))['periods']))" "$plan")
    $offline --plan serial --max-num-batched-tokens "$most" --json "$OUT/bound.json"
fi
$offline --plan serial --json "$OUT/serial.json"
