# seconds 330
# gpus 1
# asks: is the 8B's time between tokens at 14, 29 and 38 requests/s what it has to be, with --pod, --itl-slo or neither
#
# Llama-3-8B shape in bf16, ShareGPT-like lengths, Poisson; three daemons beside each other on one GPU, one of them
# asked at a time: `off`, `auto` (--pod auto, by the break-evens that pod-sweep kept or WHEELS brought, else by the
# rule; the log of its start says which) and `slo` (--pod auto --itl-slo 20ms). rows.txt: a line a rate and daemon, the
# rate of most interest first; behind it how requests ended, and how many iterations' attention went which way.
# Wanted: TPOT mean <= 0.85 and TTFT mean <= 0.75 of the peer's figures, ITL p99 no worse. `auto` above `off` by more
#   than noise (3 %) at any rate speaks against it as the default; `slo` decides about a default of --itl-slo.
# The figures: a table "Online, ShareGPT-like" behind "Attention of hybrid batches on one H200".
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
python tests/gpu/jobs/slo.py "$OUT" online --rates 29.2,38.6,14.4 --seconds 22 \
    --serve "--model-preset llama-3-8b --load-format dummy --kv-cache-gib 14 --max-num-seqs 512" \
    --way "off=--pod off" --way "auto=--pod auto" --way "slo=--pod auto --itl-slo 20ms"
