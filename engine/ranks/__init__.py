"""Tensor parallelism: the processes that share one model, a rank each, and how they keep step.

Owns: starting and watching ranks, what they share (memory, bells), the ring of orders, collectives of a CPU, and what
makes several ranks look like one runner, one host pool and one store to the engine on rank 0; so also loading, which
ends with such a runner, or that of one rank.
May import: runner/, memory/, model/, wire/ and what lies below them.
Never: schedules; knows a request, a queue or a prefix.
"""
