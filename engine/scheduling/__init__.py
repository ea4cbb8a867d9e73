"""Requests and the decision what the next iteration computes.

Owns: requests and their grammars, the waiting queue, slots, admission, preemption, fences, prefix reuse, `Scheduler`,
what is told of it.
May import: runner/ (batches), memory/, wire/ and what lies below them.
Never: touches a tensor of a device; frees a page or slot before its fence has passed; knows text.
"""
