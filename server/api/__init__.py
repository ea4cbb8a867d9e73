"""The HTTP API: endpoints, the life of a request, the answer plain or streamed.

Owns: bodies and their bounds, admission, generations, server-sent events, middleware, the page at /.
May import: tools/, batches/, replicas/ and what lies below them; engine/wire.
Never: imports torch or anything of the engine beyond its client side; starts a process.
"""
