#!/bin/sh
# Load-tests a daemon: Poisson arrivals, latencies with confidence intervals, an objective, a JSON report.
#
# Start a daemon (`weft serve`, or `make serve` in a checkout), then
# run it:  examples/load_test.sh [URL] [REPORT]
#
# Exits with the status of `weft load`: 0 if every objective is met, 1 if one is missed, 2 if nothing was measured.
set -eu
url=${1:-http://127.0.0.1:8000}
report=${2:-report.json}

# Requests leave on a fixed schedule (open loop), so a slow server gets the same load. The same seed gives the same
# requests. --warmup excludes the first arrivals from the results.
weft load --server "$url" \
  --rate 4 --duration 5s --warmup 1s --seed 7 \
  --input 32 --output 16 \
  --slo ttft:p99:30s \
  --json "$report"

# Next: find the highest rate that meets the objectives, or compare two servers:
#   weft load sweep --server a=http://… --server b=http://… --rate 0.5 --slo ttft:p99:500ms
