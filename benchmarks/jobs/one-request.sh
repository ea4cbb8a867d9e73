# Question: How fast does one request decode, and where does the time of a step go?
# Hardware: 1 GPU
# Time: 60 s
# Run: python benchmarks/jobs/run.py build/jobs --lane one-request
# Read: one.txt has tokens/s of 1024/256 with and without the prefill, the step's graphs replayed without an engine (anything
#     above that is host time and transfer), a traced step by kernel and by gap, and the host's CUDA calls. step.json is one
#     step, kernel by kernel.
python benchmarks/jobs/one_request.py "$OUT" --model-preset llama-3-8b
