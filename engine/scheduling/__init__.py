"""Requests and the decision what the next iteration computes.

Owns: the waiting queue, slots, admission, preemption, fences, prefix reuse, grammars of requests, `Scheduler`.
May import: runner/ (batches), memory/, wire/ and what lies below them.
Never: touches a tensor of a device; frees a page or slot before its fence has passed; knows text.
"""
