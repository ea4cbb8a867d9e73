# Question: When a rank is killed, does every client get its end within 2 s, and does the daemon recover?
# Hardware: 2 GPUs
# Time: 120 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-kill-rank
#     Variables: RANKS=2; STREAMS=100; MODEL: options of serve (default: a 1B with random weights)
# Read: log.txt and kills.json have, for each rank: the time until the last of 100 streams ended, how streams ended, and the
#     time until /ready is 200 again, which grows because the daemon waits longer before each restart. No GPU memory may be left in
#     the end.
exec python benchmarks/jobs/kill_rank.py "${RANKS:-2}" ${MODEL:---model benchmarks/jobs/llama-1b --load-format dummy}
