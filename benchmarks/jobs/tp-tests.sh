# Question: Do the tests of ranks pass on these GPUs?
# Hardware: 2 GPUs
# Time: 170 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-tests
#     Variables: RANKS=2
# Read: log.txt has pytest's output, then the GPU memory in use, which must be 0.
set -u
file=tests/gpu/test_ranks.py
python -m pytest -q -k "${RANKS:-2}_ranks" -s --durations=0 -p no:cacheprovider -o timeout=200 \
    $file::test_pages_leave_and_return_during_iterations_of_a_slow_rank \
    $file::test_a_killed_rank_ends_the_engine_at_once \
    $file::test_a_pipeline_gives_the_serial_plans_tokens \
    $file::test_a_batch_invariant_pipeline_gives_the_serial_plans_tokens_and_logprobs \
    $file::test_with_batch_invariance_neighbours_never_change_a_token \
    $file::test_a_run_repeats_itself \
    $file::test_every_way_to_make_sums_gives_the_same_bits \
    $file::test_the_demo_model_answers_as_on_one_gpu
status=$?
nvidia-smi --query-gpu=index,memory.used --format=csv
exit $status
