# seconds 250
# gpus 1
# asks: is the 8B's time to the first token and between tokens at 14, 29 and 38 requests/s what it has to be, and what
#   do --itl-slo and --pod auto change
#
# Llama-3-8B shape in bf16, ShareGPT-like lengths (no prompt beyond 4,000 tokens, no answer beyond 2,000, their means those
# of the distribution; no prefix cache), Poisson; daemons one after the other, both with late launch: `itl` (--itl-slo
# 25ms; simulated at 29/s: ITL p99 36 -> 23.5 ms for 2 % of TTFT, TPOT the same) and `pod` (that and --pod auto).
# rows.txt: a line a rate and daemon, the rate of most interest first; behind it how requests ended, and how many
# iterations' attention went which way. Wanted: TPOT mean <= 0.85 and TTFT mean <= 0.75 of the peer's figures, ITL p99 no
# worse: TPOT 5.1, 6.7 and 8.7 ms, TTFT 19, 29 and 53, ITL p99 19.3, 27.6 and 32.4 at 14.4, 29.2 and 38.6 requests/s.
# On 2026-11-24, late launch alone: TPOT 5.37, 7.37 and 10.0, TTFT 18.4, 24.0 and 32.1, ITL p99 13.0, 29.4 and 46.0.
# On 2026-11-27 `itl`: 5.42, 7.29 and 9.29; 20.9, 26.8 and 34.8; 17.1, 20.8 and 22.7. `pod`: 5.36, 7.25 and 9.07; 19.8,
# 26.7 and 33.0; 14.8, 20.6 and 21.4. So TPOT is missed at all three rates, TTFT at 14.4, and ITL p99 is met.
# Before 2026-11-24 lengths were a random sample with 1.3 times the tokens, and rates but the first found most of their
# prompts in the cache: such figures are comparable to one another only.
# What the daemon counted is in grown-WAY-RATE.json: weft_iteration_seconds (how long a step takes by its tokens),
# weft_device_idle_seconds, queue and prefill times.
# `--pod auto` changed nothing here on 2026-11-23, before both halves were on every SM; on 2026-11-27 it had 1 to 2 %
# less TPOT than `itl`, in one run each.
# The figures: a table "Online, ShareGPT-like" behind "Attention of hybrid batches on one H200".
# With the table that `mid` left beside it, if it did.
[ ! -s "$OUT/../mid/mid_h200.json" ] || cp "$OUT/../mid/mid_h200.json" kernels/
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
python tests/gpu/jobs/slo.py "$OUT" online --rates 29.2,38.6,14.4 --seconds 22 \
    --serve "--model-preset llama-3-8b --load-format dummy --max-num-seqs 512 --max-model-len 6000
        --no-prefix-caching" --way "itl=--itl-slo 25ms" --way "pod=--itl-slo 25ms --pod auto"
