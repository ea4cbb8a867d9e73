# seconds 370
# gpus 1
# asks: what does one launch of decodes and chunks change in TTFT, TBT and throughput of prompts of 16K, Yi-6B
#
# The shape of Yi-6B, given the positions of its long version, in bf16, 16.5K tokens a request
# with a P:D of 8 to 24, chunks of 512 as in the paper on POD-Attention (5.3); 70 % and 95 % of a capacity that the job
# finds first; --pod off, auto and on get the same arrivals. rows.txt: a line a share and daemon, JUDGED seconds in each;
# "waiting" are first tokens that did not come by then. Each share begins with as many requests as are expected to decode:
# where these were ready late, or far more or fewer decode at the end, the capacity was wrong.
# auto must not be worse than both others by more than noise; a gain over off in TBT p99 or throughput decides about
#   --pod auto as the default. Break-evens are those that pod-sweep kept or WHEELS brought, else the rule.
# On 2026-11-27 (20 s judged): a capacity of 1.355 requests/s; at 70 % no difference, at 95 % auto had
#   TBT p99 20.4 ms and TTFT mean 1.08 s for 21.8 and 1.14; `on` at 95 % was not reached, nothing was repeated.
# The figures: a table "Long prompts" behind "Attention of hybrid batches on one H200".
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
model=$(mktemp -d)/yi-6b-long
mkdir "$model"
sed 's/"max_position_embeddings": 4096/"max_position_embeddings": 32768/' engine/model/presets/yi-6b/config.json \
    > "$model/config.json"
python tests/gpu/jobs/slo.py "$OUT" long --num-pages 23000 --seconds ${JUDGED:-26} --shares "${SHARES:-0.7,0.95}" \
    --serve "--model $model --load-format dummy --max-model-len 20000 --max-num-batched-tokens 512 --plan serial" \
    --way "off=--pod off" --way "auto=--pod auto" --way "on=--pod on"
