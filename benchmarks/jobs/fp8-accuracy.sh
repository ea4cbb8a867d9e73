# Question: Does an 8B in FP8 keep float32's best token at 99 % of positions, with trained weights?
# Hardware: 1 GPU
# Time: 420 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-accuracy
#     Variables: LEARN: seconds of training; ARGMAX_OPTIONS: options of tests/gpu/fp8_argmax.py
# Read: A model of the 8B's shape learns 3,000 bytes of docs/ by heart. argmax.json has the share of positions with float32's
#     best token, on that text and on text that it has not seen. Little was learned if the loss stays above 0.5.
PYTHONPATH="tests/gpu:$PYTHONPATH" python tests/gpu/fp8_argmax.py --learn "${LEARN:-$((SECONDS_LEFT < 420 ? SECONDS_LEFT - 200 : 220))}" \
    --trial 12 --batch 2 --text docs/*.md --bytes 3000 --unseen README.md --prompts 6 --json "$OUT/argmax.json" \
    --formats "16 bits" "FP8 weights, FP8 KV" "FP8 weights" ${ARGMAX_OPTIONS:-}
