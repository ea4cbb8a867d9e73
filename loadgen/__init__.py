"""Load generator for OpenAI-compatible servers: it measures any server over HTTP.

Owns: `weft load`: arrivals, workloads, a streaming client, statistics, service level objectives, reports.
May import: the helpers for error messages of weft's `__init__.py`; no folder of weft.
Never: needs a server or an engine of weft; imports numpy or matplotlib to show `weft --help`.
"""
