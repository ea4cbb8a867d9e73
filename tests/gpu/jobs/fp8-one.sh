# seconds 150
# gpus 1
# asks: where one request's time goes in FP8, with the shipped tiles and with those that a start tunes, and a 1B's iteration
# On 2026-11-23 one request had 313.7 tokens/s with tiles that the start had tuned and 297 to 304 with the shipped ones, on
# other cards. shipped.json, tuned.json: the same engine with both, one behind the other, and bf16.json (228 to 230 so far)
# to tell cards apart; the logs have kernels by time. If `tuned` is faster, the rows of 16 tokens and 8 bits leave
# kernels/gemm_h200.json. 1b.json: 161/338 with 3,072 seats (238,451 tokens/s on 2026-11-23; 250,000 asked for) and which
# kernels its milliseconds go to.
place=$(mktemp -d)
mkdir -p "$place/weft"
tar -c --exclude=.git --exclude=./build --exclude=.venv . | tar -x -C "$place/weft"
python - "$place/weft/kernels/gemm_h200.json" << 'END'
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
table = json.loads(path.read_text())
of_one = [key for key in table if key.startswith("16,") and key.endswith(",8") and key.count(",") == 3]
path.write_text(json.dumps({key: row for key, row in table.items() if key not in of_one}))
END
bench() { # NAME PYTHONPATH OPTION ...
    local name=$1 path=$2
    shift 2
    PYTHONPATH=$path python -m weft.server bench offline --load-format dummy --no-prefix-caching --trace-iterations 8 \
        --json "$OUT/$name.json" "$@" > "$OUT/$name.txt" 2>&1 || echo "$name: exit status $?"
    python -c "
import json
f = json.load(open('$OUT/$name.json'))
print('$name', *(round(f[k], 1) for k in ('total_tokens_per_second', 'output_tokens_per_second', 'watts', 'sm_megahertz')))"
}
eight="--quantization fp8 --kv-cache-dtype fp8"
for turn in 1 2; do
    bench shipped$turn "$PYTHONPATH" --model-preset llama-3-8b $eight --workload 1024:256:1
    bench tuned$turn "$place:$PYTHONPATH" --model-preset llama-3-8b $eight --workload 1024:256:1
done
bench bf16 "$PYTHONPATH" --model-preset llama-3-8b --plan serial --workload 1024:256:1
bench 1b "$PYTHONPATH" --model tests/gpu/jobs/llama-1b $eight --max-num-batched-tokens 4096 --max-num-seqs 3072 --workload 161:338:9000
