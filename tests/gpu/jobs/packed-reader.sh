# seconds 30
# gpus 1
# asks: what a kernel would pay for unpacking 12-bit pages where it reads them
# reader.json: the quickest loop over packed pages beside the quickest over bf16, in ms, watts and joules. Decode
# attention stays without them unless the packed loop is well over 1.05 times as fast; either way the table goes into
# "Packed KV pages" of BENCHMARKS.md in place of what was reckoned from compiled code there.
python tests/gpu/packed_reader.py --json "$OUT/reader.json" ${READER_OPTIONS:-}
