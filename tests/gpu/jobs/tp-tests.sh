# seconds 170
# gpus 2
# asks: whether the tests of ranks hold on GPUs: first the one that never ran there, of pages that leave and return while
#   rank 1 is behind (its failure means that a rank copies pages that it still writes or reads: tiers must be refused with
#   ranks), then those that ran before the last changes. All passed: docs/tensor-parallel.md says so with the commit, and
#   "A daemon of two ranks" in BENCHMARKS.md.
#   RANKS: on so many GPUs instead of two.
set -u
file=tests/gpu/test_ranks.py
python -m pytest -q -k "${RANKS:-2}_ranks" -s --durations=0 -p no:cacheprovider -o timeout=200 \
    $file::test_pages_leave_and_return_beside_iterations_of_a_rank_that_is_behind \
    $file::test_a_rank_that_is_killed_ends_the_engine_at_once \
    $file::test_a_pipeline_gives_the_serial_plans_tokens \
    $file::test_a_batch_invariant_pipeline_gives_the_serial_plans_tokens_and_logprobs \
    $file::test_with_batch_invariance_neighbours_never_change_a_token \
    $file::test_a_run_repeats_itself \
    $file::test_every_way_to_make_sums_gives_the_same_bits \
    $file::test_the_demo_model_answers_as_on_one_gpu
status=$?
nvidia-smi --query-gpu=index,memory.used --format=csv # after all of that: none
exit $status
