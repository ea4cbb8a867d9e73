# Question: How much faster are decodes and prefill chunks in one attention launch than in two?
# Hardware: 1 GPU
# Time: 330 s
# Run: python benchmarks/jobs/run.py build/jobs --lane hybrid-attention
#     Variables: POD_SECONDS=250 of measuring; WHEELS: may hold pod-rows.jsonl of an earlier run to resume
# Read: sweep/summary.txt has the tables of the POD-Attention paper's batches, in bursts and sustained, and states which floors
#     are met: mean over whole tiles 1.15, 1.35 for chunks of 128 and 256, 1.03 sustained, at most 1 % slower than the best
#     other way. "Other bits" must be 0. pod-*.json are break-evens for `--pod auto`.
wheel=$(ls "$OUT"/../flash-attn/flash_attn-*.whl 2> /dev/null | head -1)
if [ -n "$wheel" ] && ! python -c "import flash_attn" 2> /dev/null; then
    place=$(mktemp -d)
    python -m pip install -q --no-index --no-deps --no-compile --target "$place" "$wheel" || exit 1
    export PYTHONPATH="$place:$PYTHONPATH"
fi
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$OUT/sweep" "$CACHE"
if [ -n "$WHEELS" ] && [ -f "$WHEELS/pod-rows.jsonl" ]; then cp "$WHEELS/pod-rows.jsonl" "$OUT/sweep/rows.jsonl"; fi
python -m weft.server bench attention --sweep paper --budget-seconds "${POD_SECONDS:-250}" --out "$OUT/sweep" --keep
status=$?
cp "$CACHE"/pod-*.json "$OUT" 2> /dev/null
exit $status
