# seconds 350
# gpus 1
# asks: do products of 64 to 512 tokens reach 0.96 of cuBLAS with narrower tiles and depths cut in parts
#
# tuning.txt: a row a product (8B, 1B, 70B on two ranks; 64 to 512 tokens) in bursts: cuBLAS, the choice without a table,
#   each configuration, with all tokens live and with part of them, and "best of cuBLAS"; what hung or was wrong is named
#   and left out. Then layers sustained with watts: "of cuBLAS" is the figure that must be 0.96, "now" is without a table.
#   On 2026-11-23 0.97 at 64, 128 and 256 tokens, 0.93 at 512; no "by 32" had run then. Does loading live tokens alone
#   ("by 32") bring a layer of 80 from 147 us nearer to the 113 that its bytes and four starts take?
# mid_h200.json: what was quicker than without a table by 1 %: put it beside kernels/mid_config.py and engines use it.
# before.txt: a part of test_mid (pod-tests has all of it); where it failed nothing is tuned.
# after.txt: with the table in use, in a copy of the tree: tests of products, and that an engine answers.
# offline-*.json: 400 requests of 256/128 at 128 running, iterations of 512 tokens, without and with the table, twice.
# The figures: a table "Products of 64 to 512 tokens" behind "Kernels on the H200". MID_SECONDS: of tuning, for 150.
python -m weft.kernels.mid_tuning --compile --models 8b,1b,70b/2 --tokens 64,128,256,384,512 > "$OUT/compile.txt" 2>&1 &
python tests/gpu/jobs/each.py "$OUT/before" --seconds 100 --processes 6 --together '\[(\d+-)+(?=[a-z_]+\])' \
    tests/gpu/test_mid.py::test_a_graph_of_many_gives_the_same_each_time \
    tests/gpu/test_mid.py::test_a_table_takes_effect tests/gpu/test_mid.py::test_heads_of_both_sizes \
    > "$OUT/before.txt" 2>&1
before=$?
wait
tail -1 "$OUT/compile.txt"
tail -3 "$OUT/before.txt"
[ $before = 0 ] || { echo "nothing is tuned: see before.txt"; exit 1; }
python -m weft.kernels.mid_tuning --models 8b,1b,70b/2 --tokens 256,128,512,64,384 --budget "${MID_SECONDS:-150}" \
    --hold 8b:128@80,8b:128,8b:256@160,8b:512,8b:64,1b:256,70b/2:256 --out "$OUT/mid_h200.json" | tee "$OUT/tuning.txt"
[ -s "$OUT/mid_h200.json" ] || exit 1
# A copy, because other jobs may run in this tree meanwhile.
place=$(mktemp -d)
mkdir "$place/weft"
tar -c --exclude=.git --exclude=./build --exclude=.venv . | tar -x -C "$place/weft"
cp "$OUT/mid_h200.json" "$place/weft/kernels/mid_h200.json"
run() { # the name of its file
    python -m weft.server bench offline --load-format dummy --model-preset llama-3-8b --plan serial \
        --workload 256:128:400 --max-num-seqs 128 --max-num-batched-tokens 512 --trace-iterations 0 \
        --json "$OUT/offline-$1.json" > /dev/null
    python -c "
import json
f = json.load(open('$OUT/offline-$1.json'))
print('$1', round(f['total_tokens_per_second']), 'tokens/s', round(f.get('watts', 0)), 'W')"
}
run without-1
PYTHONPATH="$place:$PYTHONPATH" run with-1
PYTHONPATH="$place:$PYTHONPATH" run with-2
run without-2
cd "$place/weft" || exit 1
PYTHONPATH="$place:$PYTHONPATH" timeout "${AFTER_SECONDS:-90}" python -m pytest -q -p no:cacheprovider tests/gpu/test_projections.py \
    tests/gpu/test_engine.py > "$OUT/after.txt" 2>&1
echo "tests with the table: exit status $?"
tail -3 "$OUT/after.txt"
