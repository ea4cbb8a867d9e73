"""What operators see: counters, Prometheus metrics, traces, rate limits.

Owns: metric names (an API), the shared board of API processes, exposition, spans, token buckets.
May import: the ground files of server/, engine/wire.
Never: changes an answer.
"""
