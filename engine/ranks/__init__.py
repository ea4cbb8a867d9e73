"""Tensor parallelism: the processes that share one model, one per rank, and how they stay in step.

Owns: starting and watching ranks, shared memory and bells, the ring of orders, CPU collectives, model loading, and the
wrappers that make several ranks look like one runner, host pool and store to the engine on rank 0.
May import: runner/, memory/, model/, wire/ and the packages below them.
Never: schedules, or handles a request, a queue or a prefix.
"""
