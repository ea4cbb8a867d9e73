# seconds 240
# gpus 1
# asks: whether the tests of FP8 pass on a GPU, those of the engine first: what they cover was interpreted only so far
# beside.txt: pytest's word on each test, many processes beside each other (most of the time is compiling); rest.txt: those
# that had no result there or failed, one at a time. results.txt: how many of each file passed, and the names of the
# others. All passing, docs/quantization.md no longer says that tuned tiles, unpacked pages and rows that leave the last
# layer were interpreted only. What hangs ends after its time.
FILES=${FILES:-"tests/gpu/test_fp8_engine.py tests/gpu/test_unread_rows.py tests/gpu/test_fp8_attention.py
    tests/gpu/test_fp8_projections.py tests/gpu/test_packed_page.py"}
run() { # SECONDS, pytest's arguments
    local most=$1
    shift
    timeout -k 5 -s INT "$most" python -m pytest --tb=short -p no:cacheprovider -m "nightly or not nightly" \
        --timeout 100 --timeout-method thread "$@"
}
run 60 --collect-only -q $FILES | grep :: | sort > "$OUT/all.txt"
run $(((SECONDS_LEFT - SECONDS) * 2 / 3)) -v -n "${WORKERS:-14}" --dist worksteal $FILES > "$OUT/beside.txt" 2>&1
echo "beside each other: $SECONDS s, $(tail -n 1 "$OUT/beside.txt")"
passed() { sed -nE 's/^(\[gw[0-9]+\] .*)?(PASSED|SKIPPED) (tests.*[^ ]) *$/\3/p; s/^(tests.*) (PASSED|SKIPPED).*$/\1/p' "$@" | sort -u; }
passed "$OUT/beside.txt" | comm -13 - "$OUT/all.txt" > "$OUT/left.txt"
touch "$OUT/rest.txt"
if [ -s "$OUT/left.txt" ] && [ $((SECONDS_LEFT - SECONDS)) -gt 15 ]; then
    run $((SECONDS_LEFT - SECONDS - 8)) -v "@$OUT/left.txt" > "$OUT/rest.txt" 2>&1
    echo "one at a time: $(tail -n 1 "$OUT/rest.txt")"
fi
passed "$OUT/beside.txt" "$OUT/rest.txt" > "$OUT/passed.txt"
for file in $FILES; do
    echo "$file: $(grep -c "^$file" "$OUT/passed.txt") of $(grep -c "^$file" "$OUT/all.txt") passed or skipped"
done | tee "$OUT/results.txt"
comm -23 "$OUT/all.txt" "$OUT/passed.txt" | sed 's/^/not passed: /' | tee -a "$OUT/results.txt"
