# Question: What does energy metering cost, and do the joules add up to the driver's counter?
# Hardware: 1 GPU
# Time: 225 s
# Run: python benchmarks/jobs/run.py build/jobs --lane energy-metering
#     Variables: MODEL, SUM_SECONDS=100, METER_FLAGS
# Read: log.txt has the cost of metering per iteration for 128, 1 and 512 requests with its standard error (0.2 % is the limit),
#     then requests plus idle as a share of the counter (3 % is the limit). metering.jsonl has the same figures.
python benchmarks/jobs/metering_cost.py "$OUT" ${MODEL:---model-preset llama-3-8b} --sum-seconds "${SUM_SECONDS:-100}" ${METER_FLAGS:-}
