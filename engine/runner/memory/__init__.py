"""The memory of weights and KV pool.

Owns: memory that can be given back while a model sleeps, and memory shared between engines.
May import: `options/` and below.
Never: decides when a model sleeps.
"""
