# seconds 250
# gpus 2
# asks: what `early` (a product begins on the rows of a sum that have come) does in engines, which no start chooses: in a
#   copy of the tree where starts do. First whether every way to make sums still gives the same bits and a batch-invariant
#   pipeline the serial plan's, then total tokens/s of a Llama-3-70B, 1024/512 x 1000 on four (x 300 on two)
#   -> early.json (issue, of four: 75 % of Equation 5's optimum; 73.8 without). If bits hold and tp-ranks' new.json has
#   `early` before `sent-two`, BEGINS_EARLY becomes True in engine/runner/peer_collectives.py. A hang shows here as an end
#   by the time: nothing else is lost. Behind tp-ranks, whose kernels and tiles it finds in the cache.
#   RANKS: on so many GPUs instead of two.
set -u
export COLUMNS=140
place=$(mktemp -d)
mkdir "$place/weft"
tar -c --exclude ./.git --exclude ./build --exclude ./.venv . | tar -x -C "$place/weft"
cd "$place/weft" || exit 1
sed -i 's/^BEGINS_EARLY = False$/BEGINS_EARLY = True/' engine/runner/peer_collectives.py
grep -q '^BEGINS_EARLY = True$' engine/runner/peer_collectives.py || exit 1
export PYTHONPATH="$place:$PYTHONPATH"
python -m pytest -q -k "${RANKS:-2}_ranks" -s --durations=0 -p no:cacheprovider -o timeout=120 \
    tests/gpu/test_ranks.py::test_every_way_to_make_sums_gives_the_same_bits \
    tests/gpu/test_ranks.py::test_a_batch_invariant_pipeline_gives_the_serial_plans_tokens_and_logprobs
count=300
if [ "${RANKS:-2}" = 4 ]; then count=1000; fi
python -m weft.server bench offline --model-preset llama-3-70b --load-format dummy --tensor-parallel-size "${RANKS:-2}" \
    --workload 1024:512:$count --then 512:512:$count --json "$OUT/early.json"
