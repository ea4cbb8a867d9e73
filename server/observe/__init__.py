"""Observability: counters, Prometheus metrics, traces, rate limits, and the URLs of daemons.

Owns: metric names (an API), the shared state of API processes, exposition, spans, token buckets, URLs of daemons.
May import: the ground files of server/, engine/wire.
Never: changes a response.
"""
