"""Load generator for OpenAI-compatible servers: arrivals, workloads, a streaming client, statistics and reports.

It speaks only HTTP. From weft it imports only helpers for error messages, from weft's `__init__.py`.
"""
