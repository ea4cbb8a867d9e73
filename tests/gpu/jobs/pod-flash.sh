# seconds 240
# gpus 1
# asks: does the flash-attn back end serve with the real package, and how quick is that package beside our attention
#
# flash-attn 2.8.3 from its source (forward over pages, bf16, heads of 64 and 128, sm_90: build_flash.py): its wheel, if
# WHEELS has one, is there for every job already; else it is built here of flash_attn-2.8.3.tar.gz (8.4 MB, CUTLASS is
# in it), looked for in WHEELS and beside it, by nvcc on several cores: some 100 s. The wheel then comes back in OUT.
# tests.txt: the back end's tests. A failure tells what the package does otherwise than they think.
# flash/summary.txt: our ways beside flash-attn, in turn and on two streams, over 90 batches in bursts.
# offline-*.json: 200 requests of 1024/256 by this back end, and by ours.
# The figures: "flash-attn beside our ways" in "Attention of hybrid batches on one H200", of 2026-11-27. Those of the
# day before are void but for offline-*.json and the tests: its chunks had no keys then.
if ! python -c "import flash_attn" 2> /dev/null; then
    archive=$(ls "$WHEELS"/flash_attn-2.8.3.tar.gz "$WHEELS"/../flash_attn-2.8.3.tar.gz 2> /dev/null | head -1)
    [ -n "$archive" ] || { echo "neither a wheel of flash-attn nor flash_attn-2.8.3.tar.gz in WHEELS"; exit 1; }
    place=$(mktemp -d)
    python tests/gpu/jobs/build_flash.py "$archive" "$place" || exit 1
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
offline() { # the name of its file, then options
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
