# Question: Do the FP8 expert kernels pass their tests, and how fast are they compared with bf16?
# Hardware: 1 GPU
# Time: 190 s
# Run: python benchmarks/jobs/run.py build/jobs --lane fp8-experts
#     Variables: PRESET=qwen3-30b-a3b, REQUESTS=200; ANYWAY=1 measures even if a test fails
# Read: results.txt has one line per group of tests. kernels.json has both expert GEMMs of a layer in FP8 and bf16
#     (`of_ceiling` is the ratio). fp8.json and bf16.json are whole models.
many=$(python -c 'import xdist' 2>/dev/null && echo "-n ${WORKERS:-6}")
files() {  # NAME SECONDS SECONDS-OF-A-TEST PYTEST-ARGUMENT ...
    local name=$1 most=$2 each=$3 begun=$SECONDS left=$((SECONDS_LEFT - SECONDS - 3)) status
    shift 3
    [ $left -lt "$most" ] && most=$left
    [ "$most" -lt 10 ] && echo "$name: no time was left" | tee -a "$OUT/results.txt" && return 1
    timeout -k 5 "$most" python -m pytest -q -p no:cacheprovider -m "nightly or not nightly" --timeout "$each" \
        --timeout-method thread $many "$@" >"$OUT/$name.txt" 2>&1
    status=$?
    echo "$name: exit status $status after $((SECONDS - begun)) s: $(tail -n 1 "$OUT/$name.txt")" |
        tee -a "$OUT/results.txt"
    return $status
}
kernels=tests/gpu/test_fp8_experts.py
files portable 60 40 $kernels -k "few or some or many or a_layer_of or tall or gate_of" --deselect \
    $kernels::test_a_row_is_the_same_to_the_bit_for_any_neighbours
files special 60 40 $kernels -k "special or narrow or chosen or whatever_the_neighbours"
special=$?
files engine 70 60 tests/gpu/test_fp8_experts_engine.py
if [ $special = 0 ] || [ -n "$ANYWAY" ]; then
    timeout -k 5 75 python -m weft.server bench kernels --only fp8-experts --seconds 1 --json "$OUT/kernels.json"
    for name in fp8 bf16; do
        [ $((SECONDS_LEFT - SECONDS)) -lt 40 ] && echo "$name: no time was left" && continue
        options=
        [ $name = fp8 ] && options="--quantization fp8"
        timeout -k 5 $((SECONDS_LEFT - SECONDS - 8)) python -m weft.server bench offline --model-preset \
            "${PRESET:-qwen3-30b-a3b}" --load-format dummy --no-prefix-caching --trace-iterations 0 $options \
            --workload "1024:512:${REQUESTS:-200}" --then 1024:512:1 --json "$OUT/$name.json"
    done
fi
