# Question: Do the kernel tests pass on this GPU, and does any kernel hang?
# Hardware: 1 GPU
# Time: 260 s
# Run: python benchmarks/jobs/run.py build/jobs --lane kernel-tests
#     Variables: FILES: test files (default: hybrid attention and mid-size GEMMs)
# Read: cases.txt has one line a case as it ends, files.txt one line a file, and each case that failed or hung has its own text
#     file. Each case runs in a process with a time limit, so one hang does not stop the rest.
python -c "from weft.tools.kernels.hybrid_calls import compile_in_subprocess; compile_in_subprocess(['llama-3-8b', 'yi-6b'], 16, 100)"
python benchmarks/jobs/run_cases.py "$OUT" --seconds 110 --processes 14 --together '\[(\d+-)+(?=[a-z_]+\])' --once random_hybrid \
    ${FILES:-tests/gpu/test_hybrid_calls.py tests/gpu/test_pod.py tests/gpu/test_mid.py}
