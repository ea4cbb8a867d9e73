# seconds 130
# gpus 1
# asks: what it is worth that rows which nobody reads leave the last layer, in bf16 and in FP8
# One line a run in the log, from with-*.json and without-*.json: 1024/512 in tokens/s and tokens a joule, the serial plan
# in both. The figures: "Rows that leave the last layer" in BENCHMARKS.md.
run() { # with or without, bf16 or fp8, OPTION ...
    local name=$1-$2 never=$([ "$1" = without ] && echo "pipeline.UNREAD_FROM = 10**9")
    shift 2
    python - "$OUT/$name.json" "$@" << END > /dev/null || echo "$name: exit status $?"
import runpy, sys
from weft.engine.plans import pipeline
$never
sys.argv = ["weft", "bench", "offline", "--load-format", "dummy", "--model-preset", "llama-3-8b", "--plan", "serial",
            "--no-prefix-caching", "--trace-iterations", "0", "--json", *sys.argv[1:]]
runpy.run_module("weft.server", run_name="__main__")
END
    python -c "
import json
f = json.load(open('$OUT/$name.json'))
print('$name', *(round(f[k], 2) for k in ('total_tokens_per_second', 'tokens_per_joule', 'watts', 'sm_megahertz')))"
}
eight="--quantization fp8 --kv-cache-dtype fp8"
for way in with without; do
    run $way fp8 $eight --workload "1024:512:${REQUESTS:-400}"
    run $way bf16 --workload "1024:512:${BF16_REQUESTS:-300}"
done
