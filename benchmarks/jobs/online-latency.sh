# Question: What are TTFT, TPOT and ITL of an 8B at 14, 29 and 39 requests/s, ShareGPT-like lengths?
# Hardware: 1 GPU
# Time: 250 s
# Run: python benchmarks/jobs/run.py build/jobs --lane online-latency
# Read: rows.txt has one line a rate and daemon: `itl` (--itl-slo 25ms) and `pod` (that and --pod auto). Aims: mean TTFT 19, 29 and
#     53 ms, mean TPOT 5.1, 6.7 and 8.7 ms, ITL p99 19.3, 27.6 and 32.4 ms. grown-*.json has what the daemon counted.
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
python benchmarks/jobs/latency.py "$OUT" online --rates 29.2,38.6,14.4 --seconds 22 \
    --serve "--model-preset llama-3-8b --load-format dummy --max-num-seqs 512 --max-model-len 6000
        --no-prefix-caching" --way "itl=--itl-slo 25ms" --way "pod=--itl-slo 25ms --pod auto"
