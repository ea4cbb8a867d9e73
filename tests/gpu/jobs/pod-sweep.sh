# seconds 330
# gpus 1
# asks: how much does one launch of decodes and chunks gain, in bursts and sustained, with how many joules, over what
#
# The paper's batches (1,441, Yi-6B and Llama-3-8B, and those of its Tables 1 and 8), 250 s of measurements behind some
# 60 s of compiling. summary.txt has the tables, and the floors with whether they are met:
#   bursts, mean over whole tiles in turn >= 1.15 (1.28 is the paper's), chunks of 128 and 256 >= 1.35, sustained
#   >= 1.03, never slower than the best other way by more than 1 %; "other bits than the two halves" must be 0.
# The floors hold of `pod rule`; "setting of the nearest other batch" is what `--pod auto` gains by the kept table.
# Tables 5 to 7 are of serving: slo-online and slo-long-*.
# flash-attn is a way where its package is there: in WHEELS, or built by pod-flash before this in the same run.
#
# What comes back: rows.jsonl (the next run of the same kernels on the same kind of card goes on behind it: give it to
# that run in WHEELS as pod-rows.jsonl), summary, tables, CSV, pictures, and pod-*.json, the break-evens: kept on this
# machine for the jobs behind; for another run in WHEELS, or committed beside kernels/break_evens.py, where every engine
# finds them. The figures: "Attention of hybrid batches on one H200". POD_SECONDS: of measuring, for 250.
wheel=$(ls "$OUT"/../pod-flash/flash_attn-*.whl 2> /dev/null | head -1)
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
