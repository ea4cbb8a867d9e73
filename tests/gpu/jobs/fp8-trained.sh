# seconds 420
# gpus 1
# asks: is the best token of an 8B in FP8 that of float32 at 99 % of positions, with weights that have learned something
# A model of the 8B's shape learns 4,000 bytes of docs/ by heart within LEARN seconds (the log has its loss as it falls),
# then float32 in plain torch and engines in 16 bits, with FP8 weights, and with FP8 KV as well answer parts of that text
# and of README.md, which it has not seen. argmax.json: the share of positions with float32's best token; "share that the
# text has" says how well the text was learned. Wanted: >= 0.99 beside `float32`; made-up weights cannot show it
# (25.8 % on 2026-11-23, where rounding the weights alone did that). Of 16,000 bytes 426 steps left 1.97 nats a byte, and
# 16 bits had 97.3 %, FP8 97.0, with FP8 KV 96.1 (2026-11-24): little is learned while the loss is above 0.5. Then fewer
# bytes, or another STEP of `trained_llama.py`. The figure: "FP8 end to end".
PYTHONPATH="tests/gpu:$PYTHONPATH" python tests/gpu/fp8_argmax.py --learn "${LEARN:-$((SECONDS_LEFT < 420 ? SECONDS_LEFT - 170 : 250))}" --text docs/*.md \
    --bytes 4000 --unseen README.md --prompts 7 --json "$OUT/argmax.json" \
    --formats "16 bits" "FP8 weights, FP8 KV" "FP8 weights" ${ARGMAX_OPTIONS:-}
