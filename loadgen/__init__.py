"""Load generator for OpenAI-compatible servers: arrivals, workloads, a streaming client, statistics and reports.

Speaks HTTP only and imports nothing else of weft but what stands in its `__init__.py`: lines for errors.
"""
