# seconds 60
# gpus 1
# asks: where do the 0.25 ms a decode step lie in which one request's GPU runs no kernel, and how many tokens/s has it
#
# one.txt: tokens/s of 1024/256 with and without the prefill (median of 6; 231.5 before, the goal is 235); the step's
#   graphs replayed without an engine (what is above that is the host's and the transfer's); a traced step: kernels by
#   kind, gaps by the pair of kernels around them; CUDA calls of the host.
# Gaps inside the graph decide about fewer launches (an embedding more in an epilogue); time between two graphs
#   about sampling inside the model's graph, or sending the inputs while the step before runs.
# step.json: one step, kernel by kernel. The figures: "One request" of "Engine on one H200, serial plan".
python tests/gpu/jobs/one_request.py "$OUT" --model-preset llama-3-8b
