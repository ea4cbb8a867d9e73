# Question: Does the flash-attn backend serve, and how fast is flash-attn compared with weft's attention?
# Hardware: 1 GPU
# Time: 240 s
# Run: python benchmarks/jobs/run.py build/jobs --lane flash-attn
#     Variables: WHEELS: a folder with a wheel of flash-attn, or with flash_attn-2.8.3.tar.gz to build (100 s)
# Read: tests.txt has the tests of the backend. flash/summary.txt compares the two over 90 hybrid batches. offline-*.json
#     compare engines with each backend.
if ! python -c "import flash_attn" 2> /dev/null; then
    archive=$(ls "$WHEELS"/flash_attn-2.8.3.tar.gz "$WHEELS"/../flash_attn-2.8.3.tar.gz 2> /dev/null | head -1)
    [ -n "$archive" ] || { echo "neither a wheel of flash-attn nor flash_attn-2.8.3.tar.gz in WHEELS"; exit 1; }
    place=$(mktemp -d)
    python benchmarks/jobs/build_flash.py "$archive" "$place" || exit 1
    cp "$place"/*.whl "$OUT"
    python -m pip install -q --no-index --no-deps --no-compile --target "$place/site" "$place"/*.whl || exit 1
    export PYTHONPATH="$place/site:$PYTHONPATH"
fi
python -c "import flash_attn; print('flash-attn', flash_attn.__version__, flash_attn.__file__)" || exit 1
timeout 120 python -m pytest -q -p no:cacheprovider tests/gpu/test_attention_backends.py tests/gpu/test_engine.py \
    -k "flash or torch_attends" > "$OUT/tests.txt" 2>&1
echo "tests: exit status $?"
tail -3 "$OUT/tests.txt"
python -m weft.server bench attention --chunks 128,256,512,1024,2048 --contexts 4096,8192,16384 --decodes 8,32,64 \
    --seconds 0 --budget-seconds 60 --out "$OUT/flash"
offline() { # file name, then options
    name=$1
    shift
    python -m weft.server bench offline --load-format dummy --model-preset llama-3-8b --plan serial \
        --workload 1024:256:200 --trace-iterations 0 --tuning-seconds 0 "$@" \
        --json "$OUT/offline-$name.json" > /dev/null
    python -c "
import json
f = json.load(open('$OUT/offline-$name.json'))
print('$name', round(f['total_tokens_per_second']), 'tokens/s', round(f.get('watts', 0)), 'W')"
}
offline flash --attention-backend flash-attn --page-size 256
offline triton
