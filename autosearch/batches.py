"""The iterations that a search looks at: the dense batch, smaller ones of the same steady state, and decodes alone."""

from __future__ import annotations

from weft.autosearch.bench_protocol import Load
from weft.engine.plans.plan import TOKEN_STEP

DENSE_STEPS = 5
"""dense batches that are looked at: the largest, then each TOKEN_STEP smaller"""


def steady_within(load: Load, capacity: int | None) -> Load:
    """The same steady state with no more decodes than the KV pool has room for: the dense batch shrinks with them."""
    fitting = load.within(capacity)
    if fitting.decodes == load.decodes:
        return load
    steps = -(-load.tokens * fitting.decodes // (load.decodes * TOKEN_STEP))
    return fitting._replace(tokens=min(load.tokens, max(1, steps) * TOKEN_STEP))


def dense_batches(load: Load) -> list[Load]:
    """The load's own dense batch and smaller ones, with decodes in proportion: the same steady state."""
    sizes = [load.tokens - k * TOKEN_STEP for k in range(DENSE_STEPS)]
    return [load._replace(tokens=n, decodes=round(load.decodes * n / load.tokens)) for n in sizes if n >= TOKEN_STEP]


def decode_batches(load: Load, max_num_seqs: int, capacity: int | None) -> list[Load]:
    """Iterations in which nobody waits for prefill: every running request decodes.

    As many as have room at the workload's context, and `max_num_seqs` at a context for which they have; in whole steps
    that can be halved. Where that is no smaller than the dense batch, none.
    """
    fitting = max_num_seqs if capacity is None else min(max_num_seqs, capacity // load.context)
    batches = []
    for tokens in sorted({-(-n // (2 * TOKEN_STEP)) * 2 * TOKEN_STEP for n in (fitting, max_num_seqs)}):
        context = load.context if capacity is None else min(load.context, capacity // max(1, tokens))
        if 0 < tokens < load.tokens and context:
            batches.append(load._replace(tokens=tokens, decodes=tokens, context=context))
    return batches
