# seconds 265
# gpus 2
# asks: what a Llama-3-70B of random weights does on two H200s. First one request of 1,024 tokens, decoded alone, and the
#   phases of a start with nothing in the cache (start_seconds; the machine is bare) -> one.json, whose decode is
#   output_tokens_per_second_behind_the_first (issue, of four cards: 60). Then 1024/512 x 300: total tokens/s, with
#   fraction_of_optimum beside Equation 5 for two (issue: 68 % serial on four; 80.0 % was seen with 1024/128), W of both,
#   MHz, tokens/J, and the phases of a warm start (issue: 40 s on four; 12.4 s seen) -> whole.json; behind it, in the same
#   engine, 512/512 x 200. All for "Two ranks on two H200s" in BENCHMARKS.md, the row of the 70B.
#   The sums that the start measured and chose, products that send among them -> sums-*.json. That measurement has not
#   run in captured graphs on a GPU: where the first start does not end, all is run without it, and the issue is told.
#   RANKS=4: the same on four, 1024/512 x 1000 and 512/512 x 1000. MORE: options of both (--max-num-batched-tokens 4096).
#   What is compiled and tuned here tp-ranks and tp-send-70b find in the cache.
set -u
export COLUMNS=140
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weft
offline="python -m weft.server bench offline --model-preset llama-3-70b --load-format dummy --tensor-parallel-size ${RANKS:-2} ${MORE:-}"
alone="--workload 1024:256:1 --trace-iterations 0 --json $OUT/one.json"
if ! timeout --foreground -k 5 125 $offline $alone; then
    echo "a start that measures sums did not end well: the next ones measure none"
    offline="$offline --tuning-seconds 0"
    timeout --foreground -k 5 60 $offline $alone
fi
cp "$cache"/sums-*.json "$cache"/gemm-*.json "$OUT"
if [ "${RANKS:-2}" = 2 ]; then whole="--workload 1024:512:300 --then 512:512:200"; fi
$offline ${whole:---workload 1024:512:1000 --then 512:512:1000} --json "$OUT/whole.json"
