"""Routing of requests over several engines.

Owns: the router and its policy, the cached pages and load of each engine, an API process's connections to engines.
May import: the ground files of server/, observe, engine/wire.
Never: depends on HTTP, text, or how engines are started.
"""
