# seconds 120
# gpus 2
# asks: whether `kill -9` of each rank in turn, under 100 streams of a daemon of ranks, gives every client its end within 2 s
#   (the issue), whether the daemon serves again, and whether GPU memory is left in the end. A 1B of random weights, whose
#   ranks start in seconds; MODEL: other options of serve (--model-preset llama-3-70b --load-format dummy: 30 s more a
#   rank). -> log.txt, kills.json. "A daemon of two ranks" in BENCHMARKS.md, docs/tensor-parallel.md.
#   RANKS: on so many GPUs instead of two.
exec python tests/gpu/jobs/kill_rank.py "${RANKS:-2}" ${MODEL:---model tests/gpu/jobs/llama-1b --load-format dummy}
