# Question: Does `--max-num-seqs auto --slo` keep its objective through two shifts of the workload?
# Hardware: 1 GPU
# Time: 560 s
# Run: python benchmarks/jobs/run.py build/jobs --lane auto-slots
#     Variables: MODEL, SLO=itl:p99:40ms, PHASE_SECONDS=135, ONLINE_FLAGS
# Read: log.txt has the share of one-second windows within the objective (99 % is the aim) and each phase's throughput compared
#     with the best fixed limit (0.95 is the aim). windows.jsonl has every second. The engine runs in this process, without HTTP.
python benchmarks/jobs/workload_shifts.py "$OUT" ${MODEL:---model-preset llama-3-8b} --slo "${SLO:-itl:p99:40ms}" \
    --phase-seconds "${PHASE_SECONDS:-135}" --seconds "$((SECONDS_LEFT - 12))" ${ONLINE_FLAGS:-}
