"""Requests, and the choice of what each iteration computes.

Owns: requests and their grammars, the waiting queue, slots, admission, preemption, fences, prefix reuse, `Scheduler`,
the engine's `Loop`, and the features that listen to it.
May import: ranks/ and runner/ (batches), memory/, wire/ and what lies below them.
Never: touches a device tensor; releases a page or slot before its fence has passed; handles text, except to find the
tokens that a grammar or bad words forbid.
"""
