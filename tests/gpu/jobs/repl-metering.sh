# seconds 225
# gpus 1
# asks: does metering cost at most 0.2 % of an iteration, and do requests and rest add up to the counter within 3 %
#
# metering.py: 128, then 1 and 512 requests decode in turns of 0.4 s with metering and without (32 s each): the standard
# error beside the cost says whether the answer is one. Above 0.2 % and clear: `EnergyLedger.charge` moves off the loop.
# Then 100 s of a mixed run beside the driver's counter (SUM_SECONDS). Ten minutes of it are what repl-online sums up.
# BENCHMARKS.md "Joules on the H200" (where 19 s gave 0.995, and turns of a second scattered by 14 %); docs/energy.md.
python tests/gpu/jobs/metering.py "$OUT" ${MODEL:---model-preset llama-3-8b} --sum-seconds "${SUM_SECONDS:-100}" ${METER_FLAGS:-}
