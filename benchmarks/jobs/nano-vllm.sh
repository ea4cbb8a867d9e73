# Question: How fast is Qwen3-4B with 128 prompts of 64 tokens, with CUDA graphs and without?
# Hardware: 1 GPU
# Time: 110 s
# Run: python benchmarks/jobs/run.py build/jobs --lane nano-vllm
#     Variables: WORKLOAD=64:256:128
# Read: log.txt has total tokens/s and `mfu` with and without attention, for graphs and for `--enforce-eager`. trace.txt has idle
#     time and the time of each kind of kernel.
for flag in "" --enforce-eager; do
    name=graphs
    [ -z "$flag" ] || name=eager
    python -m weft.server bench offline ${SERVED:---model-preset qwen3-4b --load-format dummy} --workload "${WORKLOAD:-64:256:128}" \
        $flag --json "$OUT/$name.json" > "$OUT/$name.txt" 2>&1 || tail -2 "$OUT/$name.txt"
    echo "$name: $(grep -hE 'total tokens per second|mfu' "$OUT/$name.txt" | tr -s ' │\n' ' ')"
done
python -m weft.server bench offline ${SERVED:---model-preset qwen3-4b --load-format dummy} --workload "${WORKLOAD:-64:256:128}" \
    --trace "$OUT/trace.json" > "$OUT/trace.txt" 2>&1 || tail -2 "$OUT/trace.txt"
