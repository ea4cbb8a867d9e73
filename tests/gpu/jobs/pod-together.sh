# seconds 240
# gpus 1
# asks: is an SM that holds a prefill tile and three decodes at once (`pod_together`) quicker than SMs that do one or the other
# No GPU has run this kernel (compiled for sm_90: 48 bytes of registers spilled). tests.txt: whether it is right, and hangs
# nowhere. together.txt: a line a batch in bursts, the mean over those of small and of larger chunks last, some sustained.
# What counts: the rule's over together's above 1.03 on the mean of any kind of batch; then `one_launch` gets it as a
# choice. Else it goes, and "Attention of hybrid batches" in BENCHMARKS.md says by how much it lost.
timeout -k 5 60 python -c "
from weft.kernels.hybrid_calls import compile_apart
compile_apart(['llama-3-8b', 'yi-6b'], 16, 50)"
python tests/gpu/jobs/each.py "$OUT/tests" --seconds 70 --processes 12 --together '\[(\d+-)+(?=[a-z_]+\])' \
    tests/gpu/test_pod.py::test_both_halves_together tests/gpu/test_pod.py::test_either_list_may_be_empty \
    tests/gpu/test_pod.py::test_pod_with_bent_scores > "$OUT/tests.txt" 2>&1
echo "tests: exit status $?"
tail -n 3 "$OUT/tests.txt"
timeout -k 5 $((SECONDS_LEFT - SECONDS - 5)) python tests/gpu/jobs/pod_together.py \
    --seconds "${TOGETHER_SECONDS:-90}" 2>&1 | tee "$OUT/together.txt"
