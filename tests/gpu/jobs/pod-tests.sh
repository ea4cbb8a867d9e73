# seconds 260
# gpus 1
# asks: do the kernels that never ran on a GPU in this form give the right numbers, and does any of them hang
#
# cases.txt: a line a case as it ends; files.txt: a line a file; a text for each that failed or HUNG.
# test_pod all passed: one launch has the bits of its halves (2,000 random hybrid batches among them), so --pod may
#   become the default where pod-sweep shows a gain. A case that hangs names heads, page and dtype: --pod stays off.
# test_hybrid_calls: what pod-sweep times attends; its failures name the way, whose figures then count for nothing.
# test_mid: `mid` may write a table. A hang in "a_depth_in_parts" speaks against cut depths alone: tables of whole tiles
#   (split 1) are still good if "a_tile_of_any_width" passed.
# The figures: "Attention of hybrid batches on one H200" and docs/benchmarking.md say what was not compared yet.
python -c "from weft.kernels.hybrid_calls import compile_apart; compile_apart(['llama-3-8b', 'yi-6b'], 16, 100)"
python tests/gpu/jobs/each.py "$OUT" --seconds 110 --processes 14 --together '\[(\d+-)+(?=[a-z_]+\])' --once random_hybrid \
    ${POD_FILES:-tests/gpu/test_hybrid_calls.py tests/gpu/test_pod.py tests/gpu/test_mid.py}
