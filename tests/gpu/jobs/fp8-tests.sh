# seconds 200
# gpus 1
# asks: whether the tests of FP8 pass on a GPU, those of the engine first: what they cover was interpreted only so far
# A line a file in results.txt, the tests that failed in NAME.txt. Passing, docs/quantization.md no longer says that
# tuned tiles, unpacked pages and rows that leave the last layer were interpreted only. What hangs ends after its time.
# Several processes compile beside each other first; then one runs the tests: on one GPU they would disturb each other.
if python -c 'import xdist' 2>/dev/null; then
    timeout -k 5 $((SECONDS_LEFT / 3)) python -m pytest -q -p no:cacheprovider -m "nightly or not nightly" -n "${WORKERS:-8}" \
        tests/gpu/test_fp8_attention.py tests/gpu/test_fp8_projections.py tests/gpu/test_packed_page.py >/dev/null 2>&1
    echo "compiled in $SECONDS s"
fi
files() {  # NAME SECONDS SECONDS-OF-A-TEST PYTEST-ARGUMENT ...
    local name=$1 most=$2 each=$3 begun=$SECONDS left=$((SECONDS_LEFT - SECONDS - 3))
    shift 3
    [ $left -lt "$most" ] && most=$left
    [ "$most" -lt 10 ] && echo "$name: no time was left" | tee -a "$OUT/results.txt" && return
    timeout -k 5 "$most" python -m pytest -q -p no:cacheprovider -m "nightly or not nightly" --timeout "$each" \
        --timeout-method thread "$@" >"$OUT/$name.txt" 2>&1
    echo "$name: exit status $? after $((SECONDS - begun)) s: $(tail -n 1 "$OUT/$name.txt")" | tee -a "$OUT/results.txt"
}
files engine 110 100 tests/gpu/test_fp8_engine.py tests/gpu/test_unread_rows.py
files attention 90 60 tests/gpu/test_fp8_attention.py
files projections 110 60 tests/gpu/test_fp8_projections.py
files packed 40 60 tests/gpu/test_packed_page.py
