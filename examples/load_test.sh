#!/bin/sh
# Load on a daemon: Poisson arrivals, latencies with confidence, an objective that is met or missed, a JSON report.
#
# Start a daemon (`weft serve`, or `make serve` in a checkout), then
# run it:  examples/load_test.sh [URL] [REPORT]
#
# Exit status: that of `weft load`: 0 measured and every objective met, 1 an objective missed, 2 nothing to measure.
set -eu
url=${1:-http://127.0.0.1:8000}
report=${2:-report.json}

# Requests leave on a schedule fixed beforehand (open loop), so a slow server is not asked less. The same seed gives the
# same requests. --warmup leaves the first arrivals out of the figures.
weft load --server "$url" \
  --rate 4 --duration 5s --warmup 1s --seed 7 \
  --input 32 --output 16 \
  --slo ttft:p99:30s \
  --json "$report"

# Next: the highest rate that still meets the objectives, and two servers side by side:
#   weft load sweep --server a=http://… --server b=http://… --rate 0.5 --slo ttft:p99:500ms
