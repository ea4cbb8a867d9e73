# seconds 200
# gpus 2
# asks: what each way to make sums costs in iterations of a 70B's 16 layers, sustained (`weft bench ranks`): none, ours
#   in one step and two, products that send, NCCL in series, two nano-batches whose products leave their sums or send
#   them; microseconds of a layer and of its sums, tokens/s, W of both, MHz, tokens/J -> ranks.json, written after each
#   size: 2,048 tokens, 512, 64; each measurement in log.txt as it is made. "left out" below a table says why a way was
#   not gone. It is the ablation that the issue asks for: a table in BENCHMARKS.md behind "Products that send their
#   partial sums"; the trace (nano-batches, 2,048 tokens) is looked at for where sums lie. If nothing beats "one step"
#   by more than the spread, docs/tensor-parallel.md says what hiding cost and why.
#   In a bare cache it compiles for 20 s and tunes for 30 first; behind tp-70b it finds all of that. Where NCCL hangs
#   (it was not captured beside our kernels yet) the same is run again without it.
#   RANKS: on so many GPUs instead of two. ROUNDS: for 2, of ROUND_SECONDS each way, for 2.5.
set -u
export COLUMNS=140
ranks="python -m weft.server bench ranks --model-preset llama-3-70b --tensor-parallel-size ${RANKS:-2} --tuning-seconds 30"
ranks="$ranks --seconds ${ROUND_SECONDS:-2.5} --rounds ${ROUNDS:-2} --trace $OUT/ranks.trace.json.gz"
timeout --foreground -k 5 $((SECONDS_LEFT * 7 / 10)) $ranks --tokens 2048 512 64 --json "$OUT/ranks.json" \
    --ways none,one,two,sent-one,sent-two,vendor,nano,sent-nano
status=$?
if [ ! -f "$OUT/ranks.json" ]; then # not even one size
    $ranks --tokens 2048 --rounds 1 --json "$OUT/ranks.json" --ways none,one,two,sent-one,sent-two,nano,sent-nano
fi
exit $status
