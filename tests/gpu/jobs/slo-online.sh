# seconds 330
# gpus 1
# asks: is the 8B's time to the first token and between tokens at 14, 29 and 38 requests/s what it has to be, and what
#   --late-launch changes
#
# Llama-3-8B shape in bf16, ShareGPT-like lengths (no request beyond 6,000 tokens, as the peer was measured), Poisson; three
# daemons one after the other: `off`, `late` (--late-launch) and `tiles` (with --whole-tiles as well: simulated 5 % less
# TPOT and 2 ms more TTFT at 29/s; it becomes the default or goes). rows.txt: a line a rate and daemon, the rate of most interest first; behind it how requests ended, and how many iterations' attention
# went which way. Wanted: TPOT mean <= 0.85 and TTFT mean <= 0.75 of the peer's figures, ITL p99 no worse.
# On 2026-11-23 `late` had 7 and 12 % less TTFT at 29 and 39/s, and the TPOT of `off`, behind decodes alone; since then also
#   behind prompts (simulated: 10.8 ms from an arrival to its iteration instead of 13.9). A TPOT that is longer by more than
#   1 % says that the device waits (MARGINS and STRAY of `late_launch.py`). 14 GiB of pages were too few at 38.6/s then: 17
#   preemptions; and three daemons shared the GPU. Simulated for today's kernels, uncapped and capped: TPOT 8.1 and 7.7 ms
#   at 29.2/s, 11.5 and 10.8 at 38.6, where 130 to 170 run: tiles of 192 tokens should show there. What the daemon counted
#   is in grown-WAY-RATE.json: weft_iteration_seconds (how long a step takes by its
#   tokens), weft_device_idle_seconds, queue and prefill times. Then late may become the default.
# `--pod auto` alone changed nothing here on 2026-11-23.
# The figures: a table "Online, ShareGPT-like" behind "Attention of hybrid batches on one H200".
# With the table that `mid` left beside it, if it did.
[ ! -s "$OUT/../mid/mid_h200.json" ] || cp "$OUT/../mid/mid_h200.json" kernels/
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/weft"
mkdir -p "$CACHE"
[ -z "$WHEELS" ] || cp -n "$WHEELS"/pod-*.json "$CACHE" 2> /dev/null
python tests/gpu/jobs/slo.py "$OUT" online --rates 29.2,38.6,14.4 --seconds 22 \
    --serve "--model-preset llama-3-8b --load-format dummy --max-num-seqs 512 --max-model-len 6000" \
    --way "off=--pod off" --way "late=--late-launch" --way "tiles=--late-launch --whole-tiles"
