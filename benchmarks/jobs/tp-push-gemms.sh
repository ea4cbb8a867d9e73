# Question: What do GEMMs that push partial sums gain end to end on two GPUs?
# Hardware: 2 GPUs
# Time: 140 s
# Run: python benchmarks/jobs/run.py build/jobs --all tp-push-gemms
#     Variables: PRESET=llama-3-8b, WORKLOAD=1024:512:300, TURNS="on off on off"
# Read: 1-on.json, 2-off.json and so on have tokens/s, watts and tokens per joule; sums.json has what the start measured and
#     chose. "on" is that choice, or two steps from 128 tokens on if it chose none.
exec python benchmarks/jobs/push_by_turns.py "${PRESET:-llama-3-8b}" "${WORKLOAD:-1024:512:300}" ${TURNS:-on off on off}
