# seconds 380
# gpus 1
# asks: do products of 64 to 1,792 tokens reach 0.96 of cuBLAS with tiles as wide as waves want, and is it worth anything to
#   load live tokens alone
#
# tests.txt: what tests/gpu/test_mid.py has of tables, graphs and live tokens; where it failed nothing is tuned.
# tuning.txt: a row a product of the 8B in bursts, those that were never measured and those of few tokens first: cuBLAS,
#   the choice without a table, each configuration, with all tokens live and with part of them, and "best of cuBLAS"; what
#   hung or was wrong is named and left out. Then layers sustained with watts: "of cuBLAS" is the figure that must be
#   0.96, "now" is without a table. On 2026-11-23 0.97 at 64, 128 and 256 tokens, 0.93 at 512; no "by 32" had run then, and
#   nothing above 512. What to look for: by waves alone 640 and 1,280 tokens should take 0.8 of "now" (tiles 160 wide for o
#   and down), and "by 32" should bring a layer of 80 tokens from 147 us nearer to the 113 of its bytes and four starts.
#   "192 x" are tiles of three warpgroups: with "by 32" they took a layer of 192 tokens from 230 us to 188 (2026-11-24).
# mid_h200.json: the shipped table with what was measured anew: put it beside kernels/mid_table.py and engines use it.
# offline-*.json: 400 requests of 256/128, 176 running in iterations of 512 tokens and 128 in such of 1,280, without any
#   table and with it.
# after.txt: with the table in use, in a copy of the tree: tests of products, and that an engine answers.
# The figures: "Products of 64 to 512 tokens" in BENCHMARKS.md. MID_SECONDS: of tuning, for 200. AFTER_SECONDS: of after.txt.
FEW=128,384,640,1280,256,768,512,64,1024,1536,896,1792,192
python -m weft.kernels.mid_tuning --compile --models 8b --tokens $FEW > "$OUT/compile.txt" 2>&1 &
python tests/gpu/jobs/each.py "$OUT/tests" --seconds 100 --processes 6 --together '\[(\d+-)+(?=[a-z_]+\])' \
    tests/gpu/test_mid.py::test_a_tile_of_any_width_gives_the_bits_of_the_widest \
    tests/gpu/test_mid.py::test_tiles_behind_the_count_in_device_memory_are_skipped \
    tests/gpu/test_mid.py::test_loading_live_tokens_alone_changes_no_bit_of_them \
    tests/gpu/test_mid.py::test_a_graph_of_many_gives_the_same_each_time \
    tests/gpu/test_mid.py::test_a_tile_gives_the_bits_of_the_widest_for_a_thousand_tokens_too \
    tests/gpu/test_mid.py::test_a_table_takes_effect tests/gpu/test_mid.py::test_heads_of_both_sizes \
    > "$OUT/tests.txt" 2>&1
passed=$?
wait
tail -1 "$OUT/compile.txt"
tail -3 "$OUT/tests.txt"
[ $passed = 0 ] || { echo "nothing is tuned: see tests.txt"; exit 1; }
python -m weft.kernels.mid_tuning --models 8b --tokens $FEW --keep kernels/mid_h200.json --budget "${MID_SECONDS:-200}" \
    --hold 8b:192,8b:192@160,8b:384,8b:128@80,8b:640,8b:1280,8b:128,8b:512 --out "$OUT/mid_h200.json" \
    | tee "$OUT/tuning.txt"
[ -s "$OUT/mid_h200.json" ] || exit 1
# Copies, because other jobs may run in this tree meanwhile.
place=$(mktemp -d)
for tree in with without; do
    mkdir -p "$place/$tree/weft"
    tar -c --exclude=.git --exclude=./build --exclude=.venv . | tar -x -C "$place/$tree/weft"
done
cp "$OUT/mid_h200.json" "$place/with/weft/kernels/mid_h200.json"
rm "$place/without/weft/kernels/mid_h200.json"
run() { # with or without, tokens of an iteration, requests that run
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
