"""What operators see: counters, Prometheus metrics, traces, rate limits, where a daemon serves.

Owns: metric names (an API), the shared shared_state of API processes, exposition, spans, token buckets, a daemon's URL.
May import: the ground files of server/, engine/wire.
Never: changes an answer.
"""
