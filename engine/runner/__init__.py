"""A device and what runs on it: iterations, in the order of their launch.

Owns: `Batch` and `StepResult`, resolved options, the executor, captured graphs, a device's weights, pool and copies.
May import: plans/, memory/, model/ and what lies below them; kernels/.
Never: knows a request, a queue or a prefix; decides what is computed.
"""
