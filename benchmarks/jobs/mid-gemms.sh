# Question: Do GEMMs of 64 to 1,792 tokens reach 0.96 of cuBLAS, and what do their tiles gain end to end?
# Hardware: 1 GPU
# Time: 380 s
# Run: python benchmarks/jobs/run.py build/jobs --lane mid-gemms
#     Variables: MID_SECONDS=200 of tuning, AFTER_SECONDS=60 of tests with the new table
# Read: tests.txt must pass, or nothing is tuned. tuning.txt has one row a GEMM, then whole layers: "of cuBLAS" is the figure to
#     reach 0.96, "now" is the choice without a table. mid_h200.json is the new table, to be copied to kernels/matmul/.
#     offline-*.json compare engines with and without a table.
FEW=128,384,640,1280,256,768,512,64,1024,1536,896,1792,192
python -m weft.tools.kernels.mid_tuning --compile --models 8b --tokens $FEW > "$OUT/compile.txt" 2>&1 &
python benchmarks/jobs/run_cases.py "$OUT/tests" --seconds 100 --processes 6 --together '\[(\d+-)+(?=[a-z_]+\])' \
    tests/gpu/test_mid.py::test_a_tile_of_any_width_gives_the_bits_of_the_widest \
    tests/gpu/test_mid.py::test_tiles_after_the_count_in_device_memory_are_skipped \
    tests/gpu/test_mid.py::test_loading_only_live_tokens_changes_no_bit_of_them \
    tests/gpu/test_mid.py::test_a_graph_of_many_gives_the_same_each_time \
    tests/gpu/test_mid.py::test_a_tile_gives_the_bits_of_the_widest_for_a_thousand_tokens_too \
    tests/gpu/test_mid.py::test_a_table_takes_effect tests/gpu/test_mid.py::test_heads_of_both_sizes \
    > "$OUT/tests.txt" 2>&1
passed=$?
wait
tail -1 "$OUT/compile.txt"
tail -3 "$OUT/tests.txt"
[ $passed = 0 ] || { echo "nothing is tuned: see tests.txt"; exit 1; }
python -m weft.tools.kernels.mid_tuning --models 8b --tokens $FEW --keep kernels/matmul/mid_h200.json --budget "${MID_SECONDS:-200}" \
    --hold 8b:192,8b:192@160,8b:384,8b:128@80,8b:640,8b:1280,8b:128,8b:512 --out "$OUT/mid_h200.json" \
    | tee "$OUT/tuning.txt"
[ -s "$OUT/mid_h200.json" ] || exit 1
# Work on copies: other jobs may run in this tree at the same time.
place=$(mktemp -d)
for tree in with without; do
    mkdir -p "$place/$tree/weft"
    tar -c --exclude=.git --exclude=./build --exclude=.venv . | tar -x -C "$place/$tree/weft"
done
cp "$OUT/mid_h200.json" "$place/with/weft/kernels/matmul/mid_h200.json"
rm "$place/without/weft/kernels/matmul/mid_h200.json"
run() { # with or without, batched tokens, running requests
    PYTHONPATH="$place/$1:$PYTHONPATH" python -m weft.server bench offline --load-format dummy --model-preset llama-3-8b \
        --plan serial --workload 256:128:400 --max-num-seqs "$3" --max-num-batched-tokens "$2" --trace-iterations 0 \
        --json "$OUT/offline-$1-$2.json" > /dev/null
    python -c "
import json
f = json.load(open('$OUT/offline-$1-$2.json'))
print('$1', '$2', round(f['total_tokens_per_second']), 'tokens/s', round(f.get('watts', 0)), 'W')"
}
run without 512 176
run with 512 176
run with 1280 128
run without 1280 128
cd "$place/with/weft" || exit 1
PYTHONPATH="$place/with:$PYTHONPATH" timeout "${AFTER_SECONDS:-60}" python -m pytest -q -p no:cacheprovider \
    tests/gpu/test_engine.py tests/gpu/test_projections.py > "$OUT/after.txt" 2>&1
echo "tests with the table: exit status $?"
tail -3 "$OUT/after.txt"
