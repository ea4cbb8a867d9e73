"""`weft bench server`: the HTTP path without a model.

Owns: a stub engine that speaks the real protocol, a client, the figures.
May import: everything in server/; engine/wire.
Never: is imported by anything that serves.
"""
